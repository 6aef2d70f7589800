"""The effect of with_bagua on a model and its optimizers, also when it is called twice."""

import copy

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from training_scenarios.support import check_close_parameters, check_identical, mlp, scenario, seeded, sgd, square, wrap


@scenario
def resumed_on_rank_0_only():
    rank = bagua.get_rank()
    trained = seeded(mlp)
    optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3, betas=(0.8, 0.95), amsgrad=True)
    for step in range(3):
        square(trained, 0, step).backward()
        optimizer.step()
    wanted = copy.deepcopy(optimizer.state_dict())

    model = seeded(mlp, seed=rank)
    mine = torch.optim.Adam(model.parameters(), lr=1.0)
    if rank == 0:
        model.load_state_dict(trained.state_dict())
        mine.load_state_dict(copy.deepcopy(wanted))
    elif rank == 1:  # what other ranks had is forgotten
        square(model, 0, 0).backward()
        mine.step()
    wrap(model, mine)
    found = mine.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    for key, state in wanted["state"].items():
        assert set(found["state"][key]) == set(state)
        for name, tensor in state.items():
            assert torch.equal(found["state"][key][name], tensor), name
    check_close_parameters(model, trained)

    fresh = seeded(mlp)
    empty = torch.optim.Adam(fresh.parameters())
    if rank != 0:
        square(fresh, 0, 0).backward()
        empty.step()
    wrap(fresh, empty)
    assert not empty.state


@scenario
def changed_since():
    """A parameter with another shape than when the model was wrapped is named; wrapped again, the model goes on."""
    rank = bagua.get_rank()
    model = seeded(lambda: nn.Sequential(nn.Linear(80, 300), nn.Linear(300, 3)))

    def loss():
        return (
            sum((parameter * (rank + 1.0)).sum() for parameter in model.parameters()) + model[0](torch.ones(80)).sum()
        )

    for change in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrap(model, optimizer)
        loss().backward()
        if change:
            optimizer.step()
            check_identical(model)
        optimizer.zero_grad()
        model[1].bias.data, model[1].bias.grad = torch.zeros(model[1].bias.numel() * 2), None
        with pytest.raises(BaguaError, match=r"Parameter .*1\.bias.* was torch.float32 .* when the model was wrapped"):
            loss().backward()
        model.zero_grad()


class SparseLookup(nn.Module):
    """Rows of a table, by a function that nothing tells of its sparse gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))

    def forward(self, rows):
        return nn.functional.embedding(rows, self.table, sparse=True)


@scenario
def unforeseen_sparse_gradient():
    model = wrap(SparseLookup())
    with pytest.raises(NotImplementedError, match="Parameter table got a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()


@scenario
def optimizer_of_another_model():
    rank, n = bagua.get_rank(), bagua.get_world_size()
    own, other = seeded(mlp), seeded(mlp)
    for foreign in (sgd(other), sgd(copy.deepcopy(own))):
        with pytest.raises(BaguaError, match=r"optimizers\[1\], a SGD .*has no parameter of this model.*BG615"):
            own.with_bagua([sgd(own), foreign] if rank == n - 1 else [sgd(own), sgd(own)])
    weight_of_loss = nn.Parameter(torch.ones(()))
    mixed = torch.optim.SGD([{"params": own.parameters()}, {"params": [weight_of_loss]}], lr=0.05)
    own.with_bagua([mixed])
    for step in range(2):
        mixed.zero_grad()
        (square(own, rank, step) * weight_of_loss).backward()
        mixed.step()
    check_identical(own)
    emptied = sgd(other)
    emptied.param_groups.clear()
    other.with_bagua([emptied])
