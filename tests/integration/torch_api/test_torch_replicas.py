"""Replicas that drift apart are found, and those that are to be the same, or to differ, give no alarm."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rig.ranks.engine_hosts import Ranks
from rig.ranks.faults import kill_self
from rig.ranks.pool import Pools
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.base.replica_check import VARIABLE
from bagua.torch_api.train import replica_check

RANKS = [0, 1, 2]
Between = Callable[[int], object]
Program = Callable[[int], tuple[nn.Module, torch.optim.Optimizer, Between]]
"""Of a rank: its wrapped model, an optimizer, and what it does between backward and the optimizer's step."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.frozen(self.norm(self.first(x))))
        return found


def made(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, lr: float = 1e-3, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    found = optimizer(net.parameters(), lr=lr, **options)
    return net, found


def wrap(net: Any, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return net.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(), **options)


def nothing(step: int) -> None:
    """An ordinary step."""


# Programs whose replicas drift apart.


def loads_a_state_after_wrapping(rank: int) -> Any:
    net, optimizer = made()
    wrap(net, optimizer)
    if rank == 1:
        net.load_state_dict({name: one + 1 for name, one in net.state_dict().items()})
    return net, optimizer, nothing


def steps_in_a_hook(rank: int) -> Any:
    net, optimizer = made()
    wrap(net, optimizer)
    mine = torch.optim.SGD([net.last.weight], lr=1e-3)
    if rank == 2:
        net.last.weight.register_post_accumulate_grad_hook(lambda _: mine.step())
    return net, optimizer, nothing


def steps_once_more(rank: int) -> Any:
    net, optimizer = made(torch.optim.Adam, lr=1e-5)
    wrap(net, optimizer)
    return net, optimizer, lambda step: optimizer.step() if (rank, step) == (0, 1) else None


def sets_a_gradient_itself(rank: int) -> Any:
    """Of a parameter that no exchange brings one for."""
    net, optimizer = made()
    net.extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [net.extra]})
    wrap(net, optimizer)

    def between(step: int) -> None:
        net.extra.grad = torch.full((3,), float(rank == 1))

    return net, optimizer, between


def changes_a_frozen_parameter(rank: int) -> Any:
    net, optimizer = made()
    wrap(net, optimizer)
    return net, optimizer, lambda step: net.frozen.bias.data.add_(1e-3 * (rank == 1))


def replaces_a_frozen_parameter(rank: int) -> Any:
    net, optimizer = made()
    wrap(net, optimizer)
    if rank == 2:
        net.frozen.weight = nn.Parameter(torch.zeros(6, 6), requires_grad=False)
    return net, optimizer, nothing


def has_a_number_that_is_none(rank: int) -> Any:
    net, optimizer = made()
    wrap(net, optimizer)
    return net, optimizer, lambda step: net.frozen.weight.data.fill_(torch.nan) if rank == 0 else None


def lost_a_parameter(rank: int) -> Any:
    net, optimizer = made()
    net.unused = nn.Linear(2, 2).requires_grad_(False)
    wrap(net, optimizer)
    if rank == 0:
        del net.unused
    return net, optimizer, nothing


TRAINED = {"first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"}
FROZEN = {"frozen.weight", "frozen.bias"}
DRIFT: dict[str, tuple[Program, int, int, set[str]]] = {
    one.__name__: (one, exchange, rank, names)
    for one, exchange, rank, names in (
        (loads_a_state_after_wrapping, 1, 1, TRAINED | FROZEN),
        (steps_in_a_hook, 1, 2, {"last.weight"}),
        (steps_once_more, 3, 0, TRAINED),
        (sets_a_gradient_itself, 2, 1, {"extra"}),
        (changes_a_frozen_parameter, 2, 1, {"frozen.bias"}),
        (replaces_a_frozen_parameter, 1, 2, {"frozen.weight"}),
        (has_a_number_that_is_none, 2, 0, {"frozen.weight"}),
        (lost_a_parameter, 1, 0, {"unused.weight", "unused.bias"}),
    )
}


# Programs whose replicas are the same, or differ where they may.


def trains_with(**options: Any) -> Program:
    def program(rank: int) -> Any:
        net, optimizer = made(**options)
        return wrap(net, optimizer), optimizer, nothing

    return program


def has_parameters_of_its_own(rank: int) -> Any:
    net, optimizer = made()
    net.mine = nn.Parameter(torch.full((3,), float(rank)))
    net.expert = nn.Parameter(torch.full((3,), float(rank)))
    net.expert.expert = True
    net._bagua_params_and_buffers_to_ignore = ["mine"]
    return wrap(net, optimizer), optimizer, nothing


def is_not_finite_anywhere(rank: int) -> Any:
    net, optimizer = made()
    wrap(net, optimizer)
    return net, optimizer, lambda step: net.frozen.weight.data.fill_(torch.inf if rank else torch.nan)


def steps_in_backward(rank: int) -> Any:
    net, optimizer = made(torch.optim.AdamW)
    return wrap(net, optimizer, step_in_backward=True), optimizer, nothing


def computes_with_other_last_bits(rank: int) -> Any:
    """As another processor would: each step moves values to neighbours, on each rank others."""
    net, optimizer = made(torch.optim.Adam, weight_decay=1e-3)
    wrap(net, optimizer)
    bits = torch.Generator().manual_seed(rank)

    def move(*_: object) -> None:
        for one in net.parameters():
            one.data.view(torch.int32).add_(torch.randint(-1, 2, one.shape, generator=bits, dtype=torch.int32))

    optimizer.register_step_post_hook(move)
    return net, optimizer, nothing


ALIKE: dict[str, Program] = {
    "SGD": trains_with(momentum=0.9, nesterov=True),
    "Adam": trains_with(optimizer=torch.optim.Adam, amsgrad=True),
    "Adagrad": trains_with(optimizer=torch.optim.Adagrad),
    "Adadelta": trains_with(optimizer=torch.optim.Adadelta),
    "Rprop": trains_with(optimizer=torch.optim.Rprop),
    **{
        one.__name__: one
        for one in (
            has_parameters_of_its_own,
            is_not_finite_anywhere,
            steps_in_backward,
            computes_with_other_last_bits,
        )
    },
}


def rank_trains(name: str, setting: str = "error", steps: int = 4, every: int = 500) -> tuple[int, str, list[str]]:
    """Number of the pass that raised, or how many there were; the error; warnings."""
    os.environ[VARIABLE] = setting
    replica_check.EVERY = every
    rank, told = bagua.get_rank(), Told()
    logging.getLogger("bagua").addHandler(told)
    model = None
    try:
        model, optimizer, between = (ALIKE | {name: one[0] for name, one in DRIFT.items()})[name](rank)
        generator = torch.Generator().manual_seed(rank)
        for step in range(steps):
            optimizer.zero_grad()
            try:
                model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            except BaguaError as error:
                return step + 1, str(error), told.texts
            between(step)
            optimizer.step()
        return steps, "", told.texts
    finally:
        logging.getLogger("bagua").removeHandler(told)
        del os.environ[VARIABLE]
        replica_check.EVERY = 500
        if model is not None:
            model.bagua_ddp.close()


def rank_is_lost(after: str) -> tuple[int, str, list[str]]:
    """Member 2, in the second comparison. After it another one drifts."""
    bagua.init_process_group()
    member = bagua.get_rank()

    def program(rank: int) -> Any:
        net, optimizer = made()
        wrap(net, optimizer)

        def between(step: int) -> None:
            if step == 0 and member == 2:
                setattr(replica_check, after, lambda *_: kill_self())
            if step == 3 and member == 1:
                net.frozen.weight.data.mul_(1.001)

        return net, optimizer, between

    ALIKE["is_lost"] = program
    return rank_trains("is_lost", steps=8, every=1)


class Told(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("elastic", [False, True], ids=["", "elastic"])
@pytest.mark.parametrize("name", DRIFT)
def test_all_ranks_are_told_which_parameters_differ_where(pools: Pools, name: str, elastic: bool) -> None:
    _, exchange, rank, names = DRIFT[name]
    found = pools(RANKS, elastic=elastic).run(rank_trains, name=name)
    assert [one[0] for one in found] == [exchange] * 3
    text = found[0][1]
    assert {one[1] for one in found} == {text} and "[BG617]" in text
    assert f"rank {rank} in " in text and any(one in text for one in names)
    assert f"({len(names)} of " in text and not any(one in text for one in (TRAINED | FROZEN) - names)


def test_a_warning_comes_once_on_the_first_rank(pools: Pools) -> None:
    found = pools(RANKS).run(rank_trains, name="steps_in_a_hook", setting="warn", steps=12)
    assert [one[0] for one in found] == [12] * 3
    assert [len(one[2]) for one in found] == [1, 0, 0] and "[BG617]" in found[0][2][0]


def test_nobody_looks(pools: Pools) -> None:
    assert pools(RANKS).run(rank_trains, name="steps_in_a_hook", setting="off") == [(4, "", [])] * 3


@pytest.mark.parametrize("after", ["arithmetic", "_eps"])  # before ranks have told each other, and when they have
def test_others_compare_again_when_a_rank_is_lost(ranks: Ranks, after: str) -> None:
    ranks.start(rank_is_lost, nprocs=3, elastic=True, after=after)
    ranks.wait(60.0)
    for one in ranks.started[:2]:
        step, text, warnings = one.result()
        assert step == 5 and "rank 1 in frozen.weight (1 of" in text and warnings == []


@pytest.mark.parametrize("name", ALIKE)
def test_no_alarm(pools: Pools, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    every = 1 if name != "computes_with_other_last_bits" else 20
    assert pools(RANKS).run(rank_trains, name=name, steps=60, every=every) == [(60, "", [])] * 3


def rank_settings_differ() -> str:
    os.environ[VARIABLE] = "off" if bagua.get_rank() else "warn"
    net, optimizer = made()
    try:
        with pytest.raises(BaguaError) as error:
            wrap(net, optimizer)
    finally:
        del os.environ[VARIABLE]
    return str(error.value)


def test_the_setting_is_the_same_on_all_ranks(pools: Pools) -> None:
    (text,) = set(pools(RANKS).run(rank_settings_differ))
    assert "check_replicas" in text and "[BG603]" in text


def rank_has_fewer_batches() -> list[str]:
    """Replicas without batches make no steps until the block ends."""
    os.environ[VARIABLE], replica_check.EVERY = "error", 1
    told = Told()
    logging.getLogger("bagua").addHandler(told)
    try:
        net, optimizer = made()
        wrap(net, optimizer)
        for _ in range(2):
            with bagua.join(net):
                for _ in range(2 + bagua.get_rank()):
                    optimizer.zero_grad()
                    net(torch.randn(8, 4)).square().mean().backward()
                    optimizer.step()
        return told.texts
    finally:
        logging.getLogger("bagua").removeHandler(told)
        del os.environ[VARIABLE]
        replica_check.EVERY = 500


def test_ranks_without_batches_are_left_out(pools: Pools) -> None:
    assert pools(RANKS).run(rank_has_fewer_batches) == [[], [], []]
