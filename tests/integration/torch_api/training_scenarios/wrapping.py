"""The effect of with_bagua on a model and its optimizers, also when it is called twice."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.base.errors import BaguaError
from training_scenarios.support import (
    check_close,
    check_close_parameters,
    check_identical,
    mlp,
    scenario,
    seeded,
    sgd,
    square,
    wide_mlp,
    wide_square,
    wrap,
)


@scenario
def lbfgs() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()

    def make_optimizer(model: nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    reference, model = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
    optimizers = make_optimizer(reference), make_optimizer(model)
    wrap(model, optimizers[1])

    def step_both(step: int) -> None:
        def of_reference() -> torch.Tensor:
            optimizers[0].zero_grad()
            loss = sum(wide_square(reference, other, step) for other in range(n)) / n
            loss.backward()
            return loss

        def of_model() -> torch.Tensor:
            optimizers[1].zero_grad()
            loss = wide_square(model, rank, step)
            loss.backward()
            return loss

        first = optimizers[0].step(of_reference)
        second = optimizers[1].step(of_model) if step % 2 else optimizers[1].step(closure=of_model)
        torch.testing.assert_close(second, first, rtol=1e-9, atol=1e-12)

    for step in range(3):
        step_both(step)
    check_identical(model)
    # Its state (lists of tensors, None among them) is broadcast too.
    again = seeded(wide_mlp, seed=rank + 7)
    optimizer = make_optimizer(again)
    if rank == 0:
        optimizer.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    wrap(again, optimizer)
    (state,) = optimizer.state.values()
    (wanted,) = optimizers[1].state.values()
    assert state["n_iter"] == wanted["n_iter"] and len(state["old_dirs"]) == len(wanted["old_dirs"])
    assert all(torch.equal(a, b) for a, b in zip(state["old_dirs"], wanted["old_dirs"], strict=True))


@scenario
def resumed_on_rank_0_only() -> None:
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
def wrapped_again() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = seeded(mlp, seed=rank)
    optimizer = sgd(model)
    for average, flat in ((True, True), (False, True), (True, False), (True, True)):
        wrap(model, optimizer, average=average, do_flatten=flat)
        reference = copy.deepcopy(model)
        assert "bagua_ddp" not in vars(reference) or reference.bagua_ddp is None
        (sum(square(reference, other, 0) for other in range(n)) / (n if average else 1)).backward()
        optimizer.zero_grad()
        square(model, rank, 0).backward()
        check_close(model, reference)
        optimizer.step()
        check_identical(model)
    assert model.bagua_module_name.startswith("Sequential_")
    assert model.bagua_optimizers == [optimizer] and model.bagua_ddp.bagua_train_step_counter == 1
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    square(loaded, rank, 0).backward()
    check_close_parameters(loaded, model)
    grads = [parameter.grad for parameter in model.parameters()]
    before = [gradient.clone() for gradient in grads]
    model.bagua_ddp.close()
    model.zero_grad()
    square(model, rank, 5).backward()  # an ordinary model again
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@scenario
def trained_since() -> None:
    """A parameter that is trained since the model was wrapped is noticed in the next step, whether it was frozen, not
    there or replaced; wrapped again, the model goes on."""
    rank = bagua.get_rank()

    def thaw(model: nn.Module) -> str:
        model[0].weight.requires_grad_(True)
        return "0"

    def append(model: nn.Module) -> str:
        model.append(nn.Linear(4, 4))
        return "5"

    def assign(model: nn.Module) -> str:
        model[4] = nn.Linear(24, 4)
        return "4"

    def set_parameter(model: nn.Module) -> str:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        return "2"

    for change in (thaw, append, assign, set_parameter):
        model = seeded(mlp)
        model[0].weight.requires_grad_(change is not thaw)
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in range(3):
            square(model, rank, step).backward()
        name = change(model)
        with pytest.raises(BaguaError, match=rf"Parameter {name}\.weight is trained now.*\[BG602\]"):
            square(model, rank, 3).backward()
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
        square(model, rank, 1).backward()
        everyone = torch.zeros(bagua.get_world_size(), 320)
        bagua.allgather(model[0].weight.grad.view(-1), everyone)
        assert bool((everyone == everyone[0]).all())


@scenario
def thawed_in_any_step() -> None:
    """A parameter that was frozen when the model was wrapped is noticed in the first step that trains it: not one step
    makes replicas differ."""
    rank = bagua.get_rank()
    model = seeded(mlp)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrap(model, optimizer)
    for step in range(4):
        square(model, rank, step).backward()
        optimizer.step()
    model[0].weight.requires_grad_(True)
    with pytest.raises(BaguaError, match=r"Parameter 0\.weight is trained now"):
        square(model, rank, 4).backward()
    check_identical(model)


@scenario
def loaded_by_assignment() -> None:
    """``load_state_dict(assign=True)`` puts other parameters into the model, or into a part of it: the next step says
    so. A load that copies changes nothing."""
    rank = bagua.get_rank()
    for whole in (True, False):
        model = seeded(mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrap(model, optimizer)
        for step in range(4):
            square(model, rank, step).backward()
            optimizer.step()
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        part = model if whole else model[0]
        part.load_state_dict(copy.deepcopy(part.state_dict()), assign=True)
        with pytest.raises(BaguaError, match=r"Parameter 0\.weight is trained now"):
            square(model, rank, 4).backward()
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
        square(model, rank, 1).backward()
        check_identical(model)


@scenario
def changed_since() -> None:
    """A parameter with another dtype or shape than when the model was wrapped is named; wrapped again, the model goes
    on."""
    rank = bagua.get_rank()

    def widen(model: nn.Module) -> nn.Module:
        return model.double()

    def grow(model: nn.Module) -> nn.Module:
        model[-1].bias.data, model[-1].bias.grad = torch.zeros(model[-1].bias.numel() * 2), None
        return model

    def loss(model: nn.Module) -> torch.Tensor:
        return (
            sum((parameter * (rank + 1.0)).sum() for parameter in model.parameters()) + model(inputs(model)).sum() * 0
        )

    def inputs(model: nn.Module) -> torch.Tensor:
        return torch.ones(2, model[0].in_features, dtype=model[0].weight.dtype)

    class Odd(nn.Sequential):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self[0](rows)

    for change, name in ((widen, "."), (grow, "1.bias")):
        model = seeded(lambda: Odd(nn.Linear(80, 300), nn.Linear(5, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrap(model, optimizer)
        loss(model).backward()
        optimizer.zero_grad()
        change(model)
        with pytest.raises(BaguaError, match=f"Parameter .*{name}.* was torch.float32 .* when the model was wrapped"):
            loss(model).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        wrap(model, optimizer)
        loss(model).backward()
        optimizer.step()
        check_identical(model)


class SparseLookup(nn.Module):
    """Rows of a table, by a function that nothing tells of its sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(rows, self.table, sparse=True)


@scenario
def unforeseen_sparse_gradient() -> None:
    model = wrap(SparseLookup())
    with pytest.raises(NotImplementedError, match="Parameter table got a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()


class Forgetful(Algorithm):
    """Its reify returns nothing."""

    def reify(self, process_group: Any) -> Any:
        GradientAllReduceAlgorithm().reify(process_group)


@scenario
def arguments_that_are_none() -> None:
    with pytest.raises(TypeError, match="optimizers holds a NoneType"):
        seeded(mlp).with_bagua(None)
    with pytest.raises(TypeError, match="reify returned a NoneType"):
        seeded(mlp).with_bagua([], Forgetful())


@scenario
def optimizer_of_another_model() -> None:
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
