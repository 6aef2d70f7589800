"""Plans in an elastic job: what may run again, what is put back before, and what waits for the commit."""

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Broadcast, Local, Plan
from bagua.algorithms.plan import GRADIENT, RESULT, WEIGHT
from bagua.torch_api.job.connection import UNTOLD, Regrouped
from bagua.torch_api.step.dataflow import changed_in_place
from bagua.torch_api.step.execution import Execution, Submit, join_all
from bagua.torch_api.step.undo import Undo
from bagua.torch_api.step.weight_bucket import WeightBucket


class Connection:
    """Adds one to the memory, like an all-reduce in place. ``lost``: the generation ends before it is over."""

    def __init__(self, memory):
        self.memory = memory
        self.lost = False
        self.submitted = []

    def submit(self, request):
        self.submitted.append(dict(request))
        self.memory.add_(1)
        return len(self.submitted)

    def done(self, ticket):
        return True

    def wait(self, ticket):
        if self.lost:
            raise Regrouped("rank 3 was lost")
        return 0, 0, 0

    def wait_all(self, tickets, flags):
        return [] if self.lost else [self.wait(ticket) for ticket in tickets], UNTOLD


def bucket_of(plan, slots=()):
    def allocate(count, dtype):
        return torch.zeros(count, dtype=dtype), (1, 0)

    made = WeightBucket("b", [("w", nn.Parameter(torch.full((4,), 2.0)))], allocate)
    for slot in ("x", *slots):
        made.add_slot(slot).fill_(2.0)
    made.set_plan(plan)
    return made


def held(bucket, connection, sides=0, closing=()):
    plan = bucket.plan
    assert plan is not None
    request = {"residual_sides": sides}
    phases = [([], Submit(request, connection))]
    if closing:
        phases.append((closing, None))
    made = Execution("b", phases, connection, Undo(bucket, plan))
    bucket.execution = made
    return made


IN_PLACE = Plan((AllReduce("AVG", "x", "x"),))


def test_what_a_lost_run_changed_in_place_is_put_back():
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
def test_slots_that_are_changed_in_place(steps, changed):
    assert changed_in_place(Plan(steps)) == changed
