"""The order in which buckets go, and what is told about their times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.communication import statistics
from bagua.torch_api.train.agreement import gather_texts
from training_scenarios.support import batch, check_close, check_identical, compare, mlp, scenario, seeded, sgd, wrap


class Parallel(nn.Module):
    """Branches side by side: gradients come in the opposite of the order in which forward computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        found = {number: torch.tanh(self.branches[number](x)) for number in order}
        return torch.stack([found[number] for number in sorted(found)]).sum(0)


def branches_in_buckets(model: nn.Module) -> list[int]:
    """Numbers of branches in the order in which buckets hold them."""
    names = [slot.name for bucket in model.bagua_buckets for slot in bucket.entries]
    return list(dict.fromkeys(int(name.split(".")[1]) for name in names))


ORDERS = ([2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0])


def in_different_orders(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Every rank has another order; branch 4 is used by none."""
    return model(batch(rank, step, 6, 10), ORDERS[(rank + step) % len(ORDERS)]).square().mean()


@scenario
def order_of_arrival() -> None:
    seen = []
    model = compare(Parallel, in_different_orders, between=lambda one: seen.append(one))
    wanted = [1, 3, 0, 2, 4]  # rank 0's in the first step; the branch without a gradient comes last
    mine = json.dumps([slot.name for bucket in model.bagua_buckets for slot in bucket.entries]).encode()
    assert branches_in_buckets(model) == wanted
    assert set(gather_texts(mine, model.bagua_ddp._group)) == {mine}
    assert len(seen) == 10

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


@scenario
def order_that_needs_no_change() -> None:
    """Branches whose gradients come in the order of registration reversed, as the first buckets have them."""
    model = wrap(seeded(Parallel))
    before = model.bagua_buckets
    model(batch(bagua.get_rank(), 0, 6, 10), range(5)).sum().backward()
    changed = [slot.name for bucket in model.bagua_buckets for slot in bucket.entries]
    assert branches_in_buckets(model) == [4, 3, 2, 1, 0], changed
    # A Linear's bias comes before its weight, or after it: where it agrees with registration nothing is made again.
    if changed == [name for name, _ in reversed(model.bagua_ddp.bagua_build_params())]:
        assert model.bagua_buckets is before


@scenario
def made_again_on_demand() -> None:
    """An algorithm that asks for it gets new buckets, in the order that is known by then."""
    model = seeded(Parallel)
    optimizer = sgd(model)
    wrap(model, optimizer)
    in_different_orders(model, bagua.get_rank(), 0).backward()
    optimizer.step()
    order, before = branches_in_buckets(model), model.bagua_buckets
    algorithm = model.bagua_algorithm
    algorithm.need_reset = lambda: True
    optimizer.zero_grad()
    loss = in_different_orders(model, bagua.get_rank(), 1)
    algorithm.need_reset = lambda: False
    assert model.bagua_buckets is not before and branches_in_buckets(model) == order
    loss.backward()
    optimizer.step()
    check_identical(model)


@scenario
def statistics_add_up() -> None:
    before = statistics()
    steps = []
    compare(mlp, steps=3, between=lambda model: steps.append(statistics()))
    after = statistics()
    assert after.steps == before.steps + 3
    assert after.comm_seconds > before.comm_seconds
    assert after.bytes_local > before.bytes_local
    assert 0 <= after.hidden_share <= 1
    newest = steps[1::2]  # after the wrapped model's passes; the others belong to the reference
    for name in ("compute_seconds", "exposed_seconds", "hidden_seconds"):
        assert all(getattr(one.last_step, name) >= 0 for one in newest)
        added = sum(getattr(one.last_step, name) for one in newest)
        assert getattr(after, name) - getattr(before, name) == pytest.approx(added, abs=1e-7)
    assert after.comm_seconds == pytest.approx(after.exposed_seconds + after.hidden_seconds)
    assert after.last_step == newest[-1].last_step
    assert after.last_step.step_seconds == after.last_step.compute_seconds + after.last_step.exposed_seconds


def callers(frame: FrameType | None) -> Iterator[str]:
    """Names of a function and of those that called it, innermost first."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


@scenario
def way_of_a_gradient() -> None:
    """From autograd's hook to shared memory: few functions in few files. What begins a pass, once, is not counted."""
    model = wrap(seeded(lambda: nn.Sequential(nn.Linear(20, 1000), nn.Tanh(), nn.Linear(1000, 20))))
    seen: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        file, names = frame.f_code.co_filename, list(callers(frame))
        once = {"_begin", "touch"}.intersection(names)
        if event == "call" and "torch_api" in file and "after_gradient" in names and not once:
            seen.add((file, frame.f_code.co_qualname))

    for step in range(3):
        loss = model(batch(bagua.get_rank(), step, 6, 20)).square().mean()
        sys.setprofile(look if step == 2 else None)
        loss.backward()
        sys.setprofile(None)
    functions = {name for _, name in seen}
    if len(model.bagua_buckets) > 1:  # the last one goes when the pass ends
        assert "HostConnection.submit" in functions and "Entry.stage" in functions, functions
    assert len(functions) <= 8 and len({file for file, _ in seen}) <= 5, seen
