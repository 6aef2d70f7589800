"""The order in which buckets go, and gradients that cross between hosts encoded."""

import json

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Codec
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.train.agreement import gather_texts
from training_scenarios.support import batch, check_close, compare, scenario, seeded, wrap

ORDERS = ([2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0])


class Parallel(nn.Module):
    """Branches side by side: gradients come in the opposite of the order in which forward computes them."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))

    def forward(self, x, order):
        found = {number: torch.tanh(self.branches[number](x)) for number in order}
        return torch.stack([found[number] for number in sorted(found)]).sum(0)


def branches_in_buckets(model):
    """Numbers of branches in the order in which buckets hold them."""
    names = [slot.name for bucket in model.bagua_buckets for slot in bucket.entries]
    return list(dict.fromkeys(int(name.split(".")[1]) for name in names))


def in_different_orders(model, rank, step):
    """Every rank has another order; branch 4 is used by none."""
    return model(batch(rank, step, 6, 10), ORDERS[(rank + step) % len(ORDERS)]).square().mean()


@scenario
def order_of_arrival():
    model = compare(Parallel, in_different_orders)
    wanted = [1, 3, 0, 2, 4]  # rank 0's in the first step; the branch without a gradient comes last
    mine = json.dumps([slot.name for bucket in model.bagua_buckets for slot in bucket.entries]).encode()
    assert branches_in_buckets(model) == wanted
    assert set(gather_texts(mine, model.bagua_ddp._group)) == {mine}

    # Passes that do not synchronise are not the first one, and what they accumulated takes part.
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for flat in (True, False):
        reference, model = seeded(Parallel), wrap(seeded(Parallel), do_flatten=flat)
        for step in (1, 0):
            sum(in_different_orders(reference, other, step) / n for other in range(n)).backward()
        with model.bagua_ddp.no_sync():
            in_different_orders(model, rank, 1).backward()
        assert branches_in_buckets(model) == [4, 3, 2, 1, 0]
        in_different_orders(model, rank, 0).backward()
        assert branches_in_buckets(model) == wanted
        check_close(model, reference)


def mean_result(codec, steps=40):
    """Mean over steps of the reduced gradient, where every rank's gradient is the same in all steps. Each step
    synchronises only the second of two passes."""
    model = seeded(lambda: nn.Linear(64, 64, bias=False))
    model.with_bagua([], Algorithm.init("gradient_allreduce", codec=codec))
    mine, total = batch(bagua.get_rank(), 0, 64, 64), torch.zeros(64, 64)
    for _ in range(steps):
        model.zero_grad()
        with model.bagua_ddp.no_sync():
            (model.weight * mine).sum().backward()
        (model.weight * mine).sum().backward()
        total += model.weight.grad
    return total / steps


@scenario
def error_feedback_lives_over_steps_and_passes_without_synchronisation():
    wanted = 2 * torch.stack([batch(rank, 0, 64, 64) for rank in range(bagua.get_world_size())]).mean(0)
    if len(bagua.communication._get_default_group().hosts) > 1:
        for name, density in (("onebit", None), ("topk", 0.25)):
            fed_back, lost = [(mean_result(Codec(name, density, use)) - wanted).abs().mean() for use in (True, False)]
            assert fed_back < 0.35 * lost, (name, fed_back, lost)


class Mixed(nn.Module):
    """Layers of two dtypes, a branch that some ranks use, one that none does."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(10, 40, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x, number):
        return self.branches[number](self.wide(x.double()).float())


@scenario
def other_dtypes_and_presence_travel_as_they_are():
    rank, n = bagua.get_rank(), bagua.get_world_size()

    def loss(model, other):
        return model(batch(other, 0, 6, 10), other % 2).square().mean()

    reference, model = seeded(Mixed), seeded(Mixed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "20000")  # the codec's bound is that of a bucket
        model.with_bagua([], Algorithm.init("gradient_allreduce", codec="minmax8"))
    for _ in range(2):
        model.zero_grad()
        loss(model, rank).backward()
    (sum(loss(reference, other) for other in range(n)) / n).backward()
    assert model.branches[2].weight.grad is None
    for name in ("wide", "branches.0", *(["branches.1"] if n > 1 else [])):
        mine, wanted = model.get_submodule(name).weight.grad, reference.get_submodule(name).weight.grad
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-8 if name == "wide" else 0.02 * wanted.abs().max())
