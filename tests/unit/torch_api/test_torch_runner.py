"""What follows from a plan, and a bucket whose rank is behind, or ends: on a connection that only writes down."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Broadcast, Local, Plan
from bagua.algorithms.plan import FRESH, GRADIENT, HOST, LEADERS, RESULT, WEIGHT
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.job.connection import UNTOLD
from bagua.torch_api.step.dataflow import (
    adds_up,
    changed_in_place,
    in_place,
    may_run_twice,
    tail_path,
    tail_reaches_all,
)
from bagua.torch_api.step.gradients import GradientBucket
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.weight_bucket import WeightBucket


class Connection:
    """Everything submitted is done at once, and changes nothing."""

    kinds, dtypes, codecs = {"allreduce": 0}, {"float32": 0}, {}
    may_defer = False

    def __init__(self):
        self.submitted, self.waited = [], []
        self.fails = False

    def submit(self, request):
        self.submitted.append(dict(request))
        return len(self.submitted) - 1

    def wait(self, ticket):
        assert ticket not in self.waited
        self.waited.append(ticket)
        if self.fails:
            raise CommunicationError("rank 3 was lost")
        return (0, ticket, ticket + 1)

    def wait_all(self, tickets, flags):
        return [] if self.fails else [self.wait(ticket) for ticket in tickets], UNTOLD

    def done(self, ticket):
        return ticket != 0


class Rig:
    """One rank's runner, and buckets on it."""

    def __init__(self):
        self.connection, self.places = Connection(), 0
        session = SimpleNamespace(
            connection=self.connection,
            memory=SimpleNamespace(place_empty=self.allocate),
            membership=SimpleNamespace(rank=0, local_ranks=(0, 1), generation=1),
            elastic=False,
        )
        everyone = SimpleNamespace(id=1, ranks=(0, 1), rank=lambda: 0, nranks=lambda: 2, destroy=lambda: None)
        self.runner = Runner(session, SimpleNamespace(hosts=((0, 1),), new_communicator=lambda *_, **__: everyone))

    def allocate(self, count, dtype):
        self.places += 1
        return torch.zeros(count, dtype=dtype), (self.places, 0)

    def bucket(self, plan, kind=WeightBucket, slots=()):
        made = kind("b", [("a", nn.Parameter(torch.ones(2, 3))), ("b", nn.Parameter(torch.ones(4)))], self.allocate)
        for slot in slots:
            made.add_slot(slot)
        made.set_plan(plan)
        self.runner.adopt(made)
        return made


MEAN = AllReduce("AVG", WEIGHT, WEIGHT)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((AllReduce(),), True),
        ((Local(print, reads=(GRADIENT,), writes=("m",)), AllReduce("AVG", "m", RESULT)), True),
        (
            (Local(print, reads=(FRESH,), writes=("m",)), AllReduce("AVG", "m", "m"), Local(print, writes=(RESULT,))),
            True,
        ),
        ((AllReduce(), Local(print, reads=(GRADIENT,))), False),
        ((Local(print, reads=(GRADIENT,), writes=(RESULT,)), AllReduce("AVG", RESULT, RESULT)), False),
        ((Local(print, reads=(RESULT,)), AllReduce()), False),
    ],
)
def test_results_lie_where_contributions_do_unless_a_plan_needs_both(steps, expected):
    assert in_place(Plan(steps)) is expected
    bucket = Rig().bucket(Plan(steps), GradientBucket, slots=["m"])
    assert (bucket.slot(GRADIENT).data_ptr() == bucket.slot(RESULT).data_ptr()) is expected


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (AllReduce("AVG", WEIGHT, "no"), "no slot 'no'. It has: weight, own"),
        (AllReduce("AVG", WEIGHT, "own"), "communicated=False"),
        (AllReduce("AVG", WEIGHT, "short"), "slots of one length"),
        (Local(lambda bucket: None, reads=("gone",)), "no slot 'gone'"),
    ],
)
def test_plans_that_do_not_fit_the_slots(step, words):
    bucket = Rig().bucket(Plan((MEAN,)))
    bucket.add_slot("own", communicated=False)
    bucket.add_slot("short", 3)
    with pytest.raises(ValueError, match=words):
        bucket.set_plan(Plan((step,)))
    with pytest.raises(ValueError, match="3 elements, the parameters 10"):
        bucket.views("short")
    with pytest.raises(ValueError, match="can't have 0 elements"):
        bucket.add_slot("none", 0)


def test_whoever_is_behind_takes_part_in_what_others_have_begun():
    rig = Rig()
    seen = []
    bucket = rig.bucket(Plan((Local(seen.append), MEAN, MEAN)))
    bucket.start()
    bucket.join()
    bucket.execution.catch_up(1)
    assert len(rig.connection.submitted) == 2
    bucket.execution.catch_up(3)
    assert len(rig.connection.submitted) == 4 and seen == [bucket]
    bucket.release()
    assert rig.connection.waited == [0, 1, 2, 3]


def test_released_buckets_wait_for_what_has_begun_and_run_no_more():
    rig = Rig()
    bucket = rig.bucket(Plan((MEAN,)))
    bucket.start()
    with pytest.raises(BaguaError, match="started twice"):
        bucket.start()
    rig.connection.fails = True
    bucket.release()
    assert rig.connection.waited == [0] and bucket.done()
    with pytest.raises(BaguaError, match="can't run"):
        bucket.start()


SUM, BY_HOST = AllReduce("SUM"), AllReduce("SUM", over=HOST)
ABOVE, DOWN = AllReduce("SUM", RESULT, RESULT, over=LEADERS), Broadcast(RESULT)
LOCAL = Local(lambda bucket: None, reads=(RESULT,), writes=(RESULT,))
MOMENTUM = Local(lambda bucket: None, reads=(GRADIENT, "m"), writes=("m",))


@pytest.mark.parametrize(
    ("steps", "path", "reaches", "again", "adding"),
    [
        ((SUM,), (0,), True, True, True),
        ((AllReduce(), LOCAL), (0,), True, True, False),
        ((BY_HOST,), (0,), False, True, True),
        ((BY_HOST, ABOVE, DOWN, LOCAL), (0, 1, 2), True, True, False),
        ((BY_HOST, ABOVE), (0, 1), False, True, True),
        ((MOMENTUM, AllReduce("AVG", "m", "m")), (1,), True, False, False),
        ((AllReduce("AVG", "m", "m"), SUM), (0,), True, False, False),
        ((LOCAL,), (), False, False, False),
        ((AllReduce(codec="minmax8"),), (0,), True, True, False),
        ((AllReduce(codec="onebit"),), (0,), True, False, False),
    ],
)
def test_what_follows_from_a_plan(steps, path, reaches, again, adding):
    plan = Plan(steps)
    assert (tail_path(plan), tail_reaches_all(plan), may_run_twice(plan), adds_up(plan)) == (
        path,
        reaches,
        again,
        adding,
    )


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
