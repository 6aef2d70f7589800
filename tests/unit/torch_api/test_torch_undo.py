"""Plans in an elastic job: what may run again, what is put back before, and what waits for the commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Broadcast, Local, Plan
from bagua.algorithms.plan import COPY, GRADIENT, KEEP, RESCALE, RESULT, WEIGHT, ZERO
from bagua.torch_api.job.connection import UNTOLD, Regrouped, Request
from bagua.torch_api.step.dataflow import changed_in_place
from bagua.torch_api.step.execution import Execution, Submit, join_all
from bagua.torch_api.step.undo import Undo
from bagua.torch_api.step.weight_bucket import WeightBucket


class Connection:
    """Adds one to the memory, like an all-reduce in place. ``lost``: the generation ends before it is over."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.lost = False
        self.submitted: list[dict[str, Any]] = []

    def submit(self, request: Request) -> int:
        self.submitted.append(dict(request))
        self.memory.add_(1)
        return len(self.submitted)

    def done(self, ticket: int) -> bool:
        return True

    def wait(self, ticket: int) -> tuple[int, int, int]:
        if self.lost:
            raise Regrouped("rank 3 was lost")
        return 0, 0, 0

    def wait_all(self, tickets: Sequence[int], flags: None) -> Any:
        return [] if self.lost else [self.wait(ticket) for ticket in tickets], UNTOLD


def bucket_of(plan: Plan, slots: Sequence[str] = ()) -> WeightBucket:
    def allocate(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[int, int]]:
        return torch.zeros(count, dtype=dtype), (1, 0)

    made = WeightBucket("b", [("w", nn.Parameter(torch.full((4,), 2.0)))], allocate)
    for slot in ("x", *slots):
        made.add_slot(slot).fill_(2.0)
    made.set_plan(plan)
    return made


def held(bucket: WeightBucket, connection: Any, sides: int = 0, closing: Sequence[Any] = ()) -> Execution:
    plan = bucket.plan
    assert plan is not None
    request: Any = {"residual_sides": sides}
    phases: Any = [([], Submit(request, connection))]
    if closing:
        phases.append((closing, None))
    made = Execution("b", phases, connection, Undo(bucket, plan))
    bucket.execution = made
    return made


IN_PLACE = Plan((AllReduce("AVG", "x", "x"),))


def test_what_a_lost_run_changed_in_place_is_put_back() -> None:
    bucket = bucket_of(IN_PLACE)
    connection = Connection(bucket.slot("x"))
    execution = held(bucket, connection, closing=[lambda: bucket.slot("x").mul_(10)])
    connection.lost = True
    bucket.start()
    with pytest.raises(Regrouped):
        join_all([bucket])
    execution.rewind()
    assert bucket.slot("x").tolist() == [2.0] * 4
    connection.lost = False
    bucket.start()
    join_all([bucket])
    assert execution.arrived and bucket.slot("x").tolist() == [3.0] * 4  # what follows waits
    execution.conclude()
    execution.conclude()
    assert bucket.slot("x").tolist() == [30.0] * 4


def test_a_start_in_an_old_generation_is_told_when_it_is_joined() -> None:
    bucket = bucket_of(IN_PLACE)
    connection = Connection(bucket.slot("x"))
    execution = held(bucket, connection)
    bucket.start()
    execution.renew()
    assert execution.started and execution.lost
    with pytest.raises(Regrouped, match="before members changed"):
        join_all([bucket])
    execution.rewind()
    bucket.start()
    join_all([bucket])
    execution.conclude()
    assert bucket.slot("x").tolist() == [3.0] * 4 and execution.starts == 1


def test_residuals_change_sides_when_a_run_counts_and_not_before() -> None:
    bucket = bucket_of(IN_PLACE)
    connection = Connection(bucket.slot("x"))
    execution = held(bucket, connection, sides=1)
    for attempt in ("lost", "counts", "counts", "lost", "counts"):
        bucket.start()
        connection.lost = attempt == "lost"
        if attempt == "lost":
            execution.renew()
            execution.rewind()
        else:
            join_all([bucket])
            execution.conclude()
    assert [one["residual_sides"] for one in connection.submitted] == [1, 1, 2, 1, 1]


def test_tensors_beside_slots_are_put_back() -> None:
    memory = torch.zeros(3)
    step = Local(lambda _: None, beside=lambda: [memory])
    bucket = bucket_of(Plan((step, AllReduce("AVG", "own", "own"))), ["own"])
    execution = held(bucket, Connection(bucket.slot("own")))
    bucket.start()
    memory.fill_(7)
    execution.renew()
    execution.rewind()
    assert memory.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("steps", "changed"),
    [
        ((AllReduce(),), ()),
        ((AllReduce("AVG", WEIGHT, WEIGHT),), (WEIGHT,)),
        ((Local(print, writes=("own",)), AllReduce("AVG", "own", "own")), ()),
        ((Local(print, reads=("own",), writes=("own",)), AllReduce("AVG", "own", RESULT)), ("own",)),
        ((AllReduce(), Local(print, reads=("own",), writes=("own",))), ()),
        ((Broadcast(WEIGHT),), (WEIGHT,)),
        ((Local(print, reads=(GRADIENT,), writes=(GRADIENT,)), AllReduce()), (GRADIENT,)),
    ],
)
def test_slots_that_are_changed_in_place(steps: Any, changed: tuple[str, ...]) -> None:
    assert changed_in_place(Plan(steps)) == changed


def test_slots_follow_members_by_their_rule() -> None:
    bucket = bucket_of(IN_PLACE)
    for rule in (KEEP, ZERO, COPY, RESCALE):
        bucket.add_slot(rule, on_change=rule).fill_(6.0)
    bucket.follow_members(before=3, now=2)
    assert [bucket.slot(rule)[0].item() for rule in (KEEP, ZERO, COPY, RESCALE)] == [6.0, 0.0, 6.0, 4.0]
    with pytest.raises(ValueError, match="choose one of keep, zero, copy, rescale"):
        bucket.add_slot("more", on_change="lose")
