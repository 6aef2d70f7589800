"""Sparse gradients, in the ways in which torch's DDP has none: it needs a gradient of each table on each rank."""

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.base.errors import ConfigError
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from training_scenarios.support import check_close_parameters, check_identical, compare, scenario, seeded, wrap


class Tables(nn.Module):
    """Two tables, each of which a batch may leave out; ``shares``: the last layer has the weights of the first one.
    ``bare``: there is no last layer."""

    def __init__(self, shares=False, bare=False):
        super().__init__()
        self.first, self.second = nn.Embedding(12, 4, sparse=True), nn.EmbeddingBag(6, 4, sparse=True, mode="sum")
        self.last = nn.Linear(4, 1) if bare else nn.Linear(4, 12)
        if shares:
            self.last.weight = self.first.weight
        if bare:
            self.last.requires_grad_(False)

    def loss(self, rank, step):
        generator = torch.Generator().manual_seed(100 * step + rank)
        rows = torch.ones(3, 4) * 0.1
        if (rank + step) % 3:
            rows = rows + self.first(torch.randint(0, 12, (3, 1 + rank), generator=generator)).sum(1)
        if step % 2 and (rank or step == 3 or bagua.get_world_size() == 1):
            rows = rows + self.second(torch.randint(0, 6, (3, 2), generator=generator))
        return self.last(rows).square().mean()

    forward = loss


def sgd(model):
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)


def loss(model, rank, step):
    return model(rank, step)


@scenario
def sparse_gradients():
    """Tables that ranks leave out, at times all of them; one whose weights are those of a layer, so that its gradient
    is a dense one."""
    for shares in (False, True):
        compare(lambda shares=shares: Tables(shares), loss, sgd)


@scenario
def sparse_gradients_in_join():
    """Ranks without batches have a part in the means of the others, and hold the same in the end."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(Tables), seeded(Tables)
    optimizers = sgd(reference), sgd(model)
    wrap(model, optimizers[1])
    for step in range(n):
        optimizers[0].zero_grad()
        (sum(loss(reference, other, step) for other in range(step, n)) / n).backward()
        optimizers[0].step()
    with bagua.join(model):
        for step in range(1 + rank):
            optimizers[1].zero_grad()
            loss(model, rank, step).backward()
            optimizers[1].step()
    check_close_parameters(model, reference)
    check_identical(model)
    with pytest.raises(ConfigError, match=r"sparse.*\[BG608\]"), bagua.join(wrap(Tables(bare=True))):
        pass


@scenario
def sparse_gradients_alone():
    """No gradient of the model is a dense one. In a step in which a rank has none at all, no rank has."""

    def some(model, rank, step):
        return model.first(torch.tensor([step, rank, rank])).square().sum()

    model = compare(lambda: Tables(bare=True), some, sgd, steps=3)
    assert model.second.weight.grad is None
    found = model.first.weight.grad
    assert (found.is_sparse and found.is_coalesced()) or bagua.get_world_size() == 1


@scenario
def sparse_gradients_refused():
    """By name, on all ranks, where they can't be exchanged."""
    for optimizer, options in (
        (sgd, {"algorithm": Algorithm.init("gradient_allreduce", average=False)}),
        (sgd, {"step_in_backward": True}),
        (lambda model: QAdamOptimizer(model.parameters()), {"algorithm": Algorithm.init("qadam")}),
    ):
        model = Tables()
        with pytest.raises(NotImplementedError, match=r"Parameter first\.weight gets sparse gradients.*\[BG601\]"):
            model.with_bagua([optimizer(model)], **options)
    model = Tables()
    model._bagua_params_and_buffers_to_ignore = ["first.weight", "second.weight"]
    model.with_bagua([sgd(model)], step_in_backward=True)
