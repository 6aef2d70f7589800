"""Fused optimizers, and steps inside backward, have the bits of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.contrib import fuse_optimizer
from training_scenarios.support import batch, check_identical, mlp, scenario, seeded, square, wrap

Optimizer = Any


def layers() -> nn.Module:
    """Enough equal ones to be fused; two sizes in turn."""
    return nn.Sequential(*[nn.Linear(10, 10) for _ in range(12)])


def adam(model: nn.Module) -> Optimizer:
    """Two groups."""
    some = list(model.parameters())
    return torch.optim.Adam([{"params": some[::2]}, {"params": some[1::2], "lr": 0.01}], weight_decay=0.01)


def train(model: nn.Module, optimizer: Optimizer, steps: range, step: str = "step") -> None:
    for number in steps:
        optimizer.zero_grad()
        square(model, bagua.get_rank(), number).backward()
        getattr(optimizer, step)()


def check_same(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def plain(make: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Optimizer], steps: int) -> nn.Module:
    """A wrapped model after these steps of a plain optimizer."""
    model = seeded(make)
    held = optimizer(model)
    wrap(model, held)
    train(model, held, range(steps))
    return model


@scenario
def fused_before_and_after_wrapping() -> None:
    wanted = plain(layers, adam, 5)
    for before in (True, False):
        for do_flatten in (True, False):
            model = seeded(layers, seed=bagua.get_rank())
            optimizer = adam(model)
            if before:
                fuse_optimizer(optimizer)
            wrap(model, optimizer, do_flatten=do_flatten)
            if not before:
                fuse_optimizer(optimizer)
            train(model, optimizer, range(3), "fuse_step")
            assert optimizer._bagua_fused_optimizer.count == 24
            wrap(model, optimizer)  # once more, in the middle
            train(model, optimizer, range(3, 5), "fuse_step")
            check_same(model, wanted)
            check_identical(model)


@scenario
def fused_where_weights_are_exchanged() -> None:
    trained = []
    for step in ("step", "fuse_step"):
        model = seeded(layers)
        optimizer = fuse_optimizer(adam(model))
        model.with_bagua([optimizer], Algorithm.init("decentralized"))
        train(model, optimizer, range(5), step)
        trained.append(model)
    assert optimizer._bagua_fused_optimizer.count == 24  # type: ignore[attr-defined]
    check_same(*trained)


@scenario
def fused_qadam_through_its_warm_up() -> None:
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    trained = []
    for step in ("step", "fuse_step"):
        model = seeded(layers)
        optimizer = fuse_optimizer(QAdamOptimizer(model.parameters(), warmup_steps=3))
        model.with_bagua([optimizer], Algorithm.init("qadam"))
        train(model, optimizer, range(7), step)
        trained.append(model)
    assert optimizer._bagua_fused_optimizer.count == 24  # type: ignore[attr-defined]
    check_same(*trained)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": adam,
    "foreach": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    **{
        name: lambda model, name=name: getattr(torch.optim, name)(model.parameters(), lr=0.01)  # type: ignore[misc]
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor")
        if hasattr(torch.optim, name)
    },
}


@scenario
def steps_in_backward_have_the_same_bits() -> None:
    for number, make_optimizer in enumerate(OPTIMIZERS.values()):
        wanted = plain(mlp, make_optimizer, 3)
        model = seeded(mlp, seed=bagua.get_rank())
        optimizer = make_optimizer(model)
        wrap(model, optimizer, step_in_backward=True, do_flatten=number % 2 == 0)
        train(model, optimizer, range(3))
        check_same(model, wanted)
        check_identical(model)


@scenario
def parameters_move_in_backward_from_the_second_step_on() -> None:
    model = seeded(mlp)
    beside = nn.Parameter(torch.ones(3))  # of no bucket
    optimizer = torch.optim.SGD([*model.parameters(), beside], lr=0.1)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda one, *_: seen.append(len(one.param_groups[0]["params"])))
    wrap(model, optimizer, step_in_backward=True)
    for step in range(3):
        before = flat(model)
        optimizer.zero_grad()
        beside.grad = torch.ones(3)
        with model.bagua_ddp.no_sync():
            square(model, 0, 9).backward()
        square(model, bagua.get_rank(), step).backward()
        after = flat(model)
        assert torch.equal(before, after) == (step == 0)
        optimizer.step()
        assert torch.equal(after, flat(model)) == (step > 0)
    assert torch.allclose(beside, torch.full((3,), 0.7)) and seen == [7] * 3
    wrap(model, optimizer)  # without
    before = flat(model)
    optimizer.zero_grad()
    square(model, bagua.get_rank(), 3).backward()
    assert torch.equal(before, flat(model))
    optimizer.step()
    assert not torch.equal(before, flat(model))
    check_identical(model)


@scenario
def steps_in_backward_with_schedulers_unused_parameters_and_plans_of_several_steps() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = batch(bagua.get_rank(), step, 6, 10)
        for number in range(12):
            if number % 3 != (step + bagua.get_rank()) % 3:
                x = model[number](x)
        return x.square().mean()

    for algorithm in ("gradient_allreduce", "bytegrad", "power_sgd"):
        trained = []
        for early in (False, True):
            model = seeded(layers)
            optimizer = adam(model)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            model.with_bagua([optimizer], Algorithm.init(algorithm), step_in_backward=early)
            for step in range(5):
                optimizer.zero_grad()
                loss(model, step).backward()
                optimizer.step()
                scheduler.step()
            trained.append(model)
        check_same(*trained)


class Own(torch.optim.Optimizer):
    """Signs of gradients; ``coupled``: as long as the norm of all; ``counts``: in its groups."""

    def __init__(self, params: Any, coupled: bool = False, counts: bool = False) -> None:
        self.coupled = coupled
        super().__init__(params, {"lr": 0.1, "calls": 0, "counts": counts})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            some = [one for one in group["params"] if one.grad is not None]
            norm = torch.cat([one.grad.flatten() for one in some]).norm() if self.coupled else 1.0
            group["calls"] += group["counts"]
            for one in some:
                one.sub_(one.grad.sign() * norm, alpha=group["lr"])


@scenario
def steps_in_backward_are_refused_where_they_can_not_hold() -> None:
    def first_step(make: Callable[[nn.Module], Optimizer], spoil: Callable[[nn.Module, Optimizer], Any]) -> None:
        model = seeded(mlp)
        optimizer = make(model)
        wrap(model, optimizer, step_in_backward=True)
        before = flat(model)
        square(model, bagua.get_rank(), 0).backward()
        try:
            spoil(model, optimizer)
        finally:
            assert torch.equal(before, flat(model)), "it was told too late"

    def clip(model: nn.Module, optimizer: Optimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def clear(_: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        optimizer.step()

    def scale(model: nn.Module, optimizer: Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)

    def set_rate(_: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()

    spoilt: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
        "gradients were changed": clip,
        "zero_grad": clear,
        "GradScaler": scale,
        "closure": lambda _, optimizer: optimizer.step(lambda: 1.0),
        "settings of its groups": set_rate,
        "second backward pass": lambda model, _: square(model, bagua.get_rank(), 1).backward(),
    }
    for words, spoil in spoilt.items():
        with pytest.raises(BaguaError, match=words):
            first_step(adam, spoil)
    for own, words in ((dict(coupled=True), "steps alone"), (dict(counts=True), "once for each bucket")):
        model = seeded(mlp)
        optimizer = Own(model.parameters(), **own)
        wrap(model, optimizer, step_in_backward=True)
        square(model, bagua.get_rank(), 0).backward()
        with pytest.raises(BaguaError, match=words):
            optimizer.step()
    model = seeded(mlp)
    with pytest.raises(ConfigError, match="LBFGS"):
        wrap(model, torch.optim.LBFGS(model.parameters()), step_in_backward=True)
    with pytest.raises(ConfigError, match="exchanges gradients"):
        model.with_bagua([adam(model)], Algorithm.init("local_sgd"), step_in_backward=True)
    model = seeded(mlp)
    optimizer = Own(model.parameters())
    wrap(model, optimizer, step_in_backward=True)
    train(model, optimizer, range(3))
    check_same(model, plain(mlp, lambda model: Own(model.parameters()), 3))
    fuse_optimizer(optimizer)
    train(model, optimizer, range(3, 4), "fuse_step")
    assert "steps it in parts" in optimizer._bagua_fused_optimizer.explain()  # type: ignore[attr-defined]
