"""The runner on a connection that only writes down: what is submitted, in which order, and what steps do besides."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Broadcast, Local, Neighbours, Plan
from bagua.algorithms.plan import FRESH, GRADIENT, HOST, LEADERS, RESULT, WEIGHT
from bagua.algorithms.weights import copy_weights, set_weights
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.job.connection import UNTOLD, Times, Told
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.step.dataflow import adds_up, in_place, repeatable, tail_path, tail_reaches_all
from bagua.torch_api.step.execution import join_all
from bagua.torch_api.step.gradients import GradientBucket
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.weight_bucket import WeightBucket


class Comm:
    def __init__(self, id: int, ranks: Sequence[int], rank: int) -> None:
        self.id, self.ranks, self.destroyed = id, tuple(ranks), False
        self._rank = rank

    def rank(self) -> int:
        return self.ranks.index(self._rank)

    def nranks(self) -> int:
        return len(self.ranks)

    def destroy(self) -> None:
        self.destroyed = True


class Group:
    """Ranks 0 and 1 on one host, 2 and 3 on another."""

    hosts = ((0, 1), (2, 3))

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.made: list[Comm] = []

    def new_communicator(self, ranks: Sequence[int] | None = None, shrinks: bool = False) -> Comm:
        self.made.append(Comm(len(self.made) + 1, ranks or range(4), self.rank))
        return self.made[-1]


class Connection:
    """Everything submitted is done at once, and changes nothing."""

    def __init__(self) -> None:
        self.kinds = {name: name for name in ("allreduce", "broadcast", "send", "recv")}
        self.dtypes = {name: name for name in ("float32", "float64", "uint8")}
        self.codecs = {"minmax8": 5, "onebit": 7, "fp16": 1}
        self.submitted: list[dict[str, Any]] = []
        self.waited: list[int] = []
        self.fails = self.late = False

    def submit(self, request: Any) -> int:
        self.submitted.append(dict(request))
        return len(self.submitted) - 1

    def wait(self, ticket: int) -> Times:
        assert ticket not in self.waited
        self.waited.append(ticket)
        if self.fails:
            raise CommunicationError("rank 3 was lost")
        return (0, ticket, ticket + 1)

    def wait_all(self, tickets: Sequence[int], flags: Any) -> tuple[Sequence[Times], Told]:
        if self.fails or self.late:
            return [], UNTOLD
        return [self.wait(ticket) for ticket in tickets], UNTOLD if flags is None else (3, -2, 1)

    def done(self, ticket: int) -> bool:
        return ticket != 0


class Rig:
    """One rank's runner, and buckets on it."""

    def __init__(self, rank: int = 0) -> None:
        self.connection = Connection()
        self.group = Group(rank)
        self.memory: list[torch.Tensor] = []
        session: Any = SimpleNamespace(
            connection=self.connection,
            memory=SimpleNamespace(place_empty=self.allocate),
            membership=SimpleNamespace(rank=rank, local_ranks=(0, 1) if rank < 2 else (2, 3), generation=1),
            elastic=False,
        )
        self.runner = Runner(session, self.group)  # type: ignore[arg-type]

    def allocate(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[int, int]]:
        self.memory.append(torch.zeros(count, dtype=dtype))
        return self.memory[-1], (len(self.memory), 0)

    def weights(self, plan: Plan, name: str = "w", slots: Sequence[str] = ()) -> WeightBucket:
        parameters = [("a", nn.Parameter(torch.ones(2, 3))), ("b", nn.Parameter(torch.ones(4)))]
        return self.ready(WeightBucket(name, parameters, self.allocate), plan, slots)

    def gradients(self, plan: Plan, slots: Sequence[str] = ()) -> GradientBucket:
        parameters = [("a", nn.Parameter(torch.ones(2, 3))), ("b", nn.Parameter(torch.ones(4)))]
        return self.ready(GradientBucket("g", parameters, self.allocate), plan, slots)

    def ready(self, bucket: Any, plan: Plan, slots: Sequence[str]) -> Any:
        for slot in slots:
            bucket.add_slot(slot)
        bucket.set_plan(plan)
        self.runner.adopt(bucket)
        return bucket

    def labels(self) -> list[tuple[str, str]]:
        return [(one["kind"], one["label"].removeprefix("bucket ")) for one in self.connection.submitted]


MEAN = AllReduce("AVG", WEIGHT, WEIGHT)


def test_phases_of_several_buckets_go_in_lockstep() -> None:
    rig = Rig()
    long = Plan((AllReduce("SUM", WEIGHT, WEIGHT, over=HOST), Broadcast(WEIGHT), MEAN))
    first, second = rig.weights(long, "1"), rig.weights(long, "2")
    short = rig.weights(Plan((MEAN,)), "3")
    idle = rig.weights(Plan((MEAN,)), "4")
    for bucket in (first, second, short):
        bucket.start()
    assert rig.labels() == [("allreduce", "1"), ("allreduce", "2"), ("allreduce", "3")]
    assert not first.done() and second.done() and idle.done()
    times = join_all([first, second, short, idle])
    assert rig.labels()[3:] == [("broadcast", "1"), ("broadcast", "2"), ("allreduce", "1"), ("allreduce", "2")]
    assert rig.connection.waited == [0, 1, 2, 3, 4, 5, 6] and len(times) == 7
    assert join_all([first, second, short, idle]) == []


def test_a_phase_begins_before_the_next_bucket_is_waited_for() -> None:
    rig = Rig()
    order: list[str] = []
    submit, wait = rig.connection.submit, rig.connection.wait
    rig.connection.submit = lambda request: (order.append(f"submit {request['label']}"), submit(request))[1]
    rig.connection.wait = lambda ticket: (order.append(f"wait {ticket}"), wait(ticket))[1]
    buckets = [rig.weights(Plan((MEAN, MEAN)), name) for name in "12"]
    for bucket in buckets:
        bucket.start()
    join_all(buckets)
    assert order[2:6] == ["wait 0", "submit bucket 1", "wait 1", "submit bucket 2"]


class Flags:
    """Those that were sent behind all others, and what was waited for before them."""

    def __init__(self, connection: Connection) -> None:
        self.sent = object()
        self.told: Told | None = None
        self.before: list[int] | None = None
        self._connection = connection

    def await_sent(self) -> None:
        self.before = list(self._connection.waited)

    def arrive(self, told: Told) -> None:
        self.told = told


@pytest.mark.parametrize("late", [False, True], ids=["well", "one is late, or lost"])
def test_flags_are_waited_for_with_the_operations(late: bool) -> None:
    """In one call. Where that can't be had, before the last of them: others are over by then as a rule, and all that is
    done for them is done while the daemon still works."""
    rig = Rig()
    rig.connection.late = late
    buckets = [rig.gradients(Plan((AllReduce(),))) for _ in range(3)]
    for bucket in buckets:
        bucket.start()
    flags = Flags(rig.connection)
    times = join_all(buckets, lambda running: flags if len(running) == 3 else None)  # type: ignore[arg-type,return-value]
    assert rig.connection.waited == [0, 1, 2] and len(times) == 3
    assert (flags.told, flags.before) == ((None, [0, 1]) if late else ((3, -2, 1), None))


def test_local_steps_run_at_their_places() -> None:
    rig = Rig()
    seen: list[str] = []

    def local(name: str) -> Local:
        return Local(lambda bucket: seen.append(f"{name} after {len(rig.connection.submitted)}"))

    bucket = rig.weights(Plan((local("a"), local("b"), MEAN, local("c"), MEAN, local("d"))))
    bucket.start()
    assert seen == ["a after 0", "b after 0"]
    bucket.join()
    assert seen[2:] == ["c after 1", "d after 2"]
    alone = rig.weights(Plan((local("e"),)))
    alone.start()
    assert seen[-1] == "e after 2" and alone.done()
    alone.join()
    alone.start()


def test_what_a_local_step_raises_reaches_the_user_and_ends_the_run() -> None:
    def fail(_: PlanBucket) -> None:
        raise ArithmeticError("on purpose")

    rig = Rig()
    early, late = rig.weights(Plan((Local(fail), MEAN))), rig.weights(Plan((MEAN, Local(fail))))
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            early.start()
        late.start()
        with pytest.raises(ArithmeticError):
            late.join()
    assert len(rig.connection.submitted) == 2


def test_places_become_communicators_of_the_model() -> None:
    for rank, leaders in ((0, 1), (1, 0)):
        rig = Rig(rank)
        plan = Plan((MEAN, AllReduce("AVG", WEIGHT, WEIGHT, over=HOST), AllReduce("AVG", WEIGHT, WEIGHT, over=LEADERS)))
        buckets = [rig.weights(plan, name) for name in "12"]
        for bucket in buckets:
            bucket.start()
        join_all(buckets)
        assert [comm.ranks for comm in rig.group.made] == [(0, 1, 2, 3), (0, 1), (0, 2)][: 2 + leaders]
        assert [one["comm"] for one in rig.connection.submitted] == [1, 1, 2, 2, 3, 3][: 4 + 2 * leaders]
        own = rig.runner.own_communicator()
        rig.runner.release()
        assert own.ranks == (0, 1, 2, 3) and all(comm.destroyed for comm in rig.group.made)
        assert rig.runner.everyone not in rig.group.made[:-1]


def test_a_function_says_each_time_who_takes_part() -> None:
    rig = Rig()
    answers = [Comm(8, (0, 3), 0), None, Comm(9, (0, 1), 0)]
    bucket = rig.weights(Plan((AllReduce("AVG", WEIGHT, WEIGHT, codec="onebit", over=lambda: answers[0]), MEAN)))
    for _ in range(3):
        bucket.start()
        assert bucket.done() == (answers[0] is None or len(rig.connection.submitted) > 1)
        bucket.join()
        del answers[0]
        answers.append(None)
    assert [one["comm"] for one in rig.connection.submitted] == [8, 1, 1, 9, 1]
    assert [one["residual"] for one in rig.connection.submitted] == [1, 0, 0, 1, 0]


def test_residuals_are_numbered_by_communicator() -> None:
    rig = Rig()
    step = AllReduce("AVG", WEIGHT, WEIGHT, codec="onebit")
    plan = Plan((step, AllReduce("AVG", WEIGHT, WEIGHT, codec="onebit", over=HOST)))
    buckets = [rig.weights(plan, name) for name in "12"]
    for bucket in buckets:
        bucket.start()
    join_all(buckets)
    found = [(one["comm"], one["residual"]) for one in rig.connection.submitted]
    assert found == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_gradients_are_reduced_in_place_and_carry_their_tail() -> None:
    rig = Rig()
    bucket = rig.gradients(Plan((AllReduce(codec="minmax8"),)))
    bucket.start()
    (request,) = rig.connection.submitted
    assert request["src"] == request["dst"] and len(rig.memory) == 1
    assert request["count"] == 10 + 3 and request["exact"] == 3


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
def test_results_lie_where_contributions_do_unless_a_plan_needs_both(steps: Any, expected: bool) -> None:
    assert in_place(Plan(steps)) is expected
    bucket = Rig().gradients(Plan(steps), slots=["m"])
    assert (bucket.slot(GRADIENT).data_ptr() == bucket.slot(RESULT).data_ptr()) is expected


def test_the_tail_goes_with_the_first_all_reduce_whatever_it_reads() -> None:
    rig = Rig()
    make = Local(lambda bucket: bucket.slot("m").fill_(2), writes=("m",))
    bucket = rig.gradients(Plan((make, AllReduce("AVG", "m", "m"), AllReduce("AVG", GRADIENT, RESULT))), slots=["m"])
    for slot in bucket.entries:
        slot.parameter.grad = torch.ones_like(slot.parameter)
    bucket.entries[1].parameter.grad = None
    bucket.second_run = True
    bucket.start()
    assert bucket.slot("m").tolist() == [2.0] * 10 and len(bucket.slot("m")) == 10
    assert bucket.region("m").tail.tolist() == [1.0, 0.0, 1.0]
    bucket.join()
    assert [one["count"] for one in rig.connection.submitted] == [13, 10]
    assert bucket.wants_second_run()
    bucket.show_results()
    assert [slot.parameter.grad is None for slot in bucket.entries] == [False, True]


def test_neighbours_of_a_ring() -> None:
    step = Neighbours(WEIGHT, "own", "left", "right")
    for ranks, sends, receipts in (((0, 1, 2), [2, 1], [2, 1]), ((0, 1), [1], [1]), ((0,), [], [])):
        rig = Rig()
        everyone = Comm(5, ranks, 0)
        over = Neighbours(step.src, step.own, step.left, step.right, over=lambda c=everyone: c)
        bucket = rig.weights(Plan((over,)), slots=["own", "left", "right"])
        bucket.slot("left").fill_(7)
        bucket.start()
        bucket.join()
        found = rig.connection.submitted
        assert [one["root"] for one in found if one["kind"] == "send"] == sends
        assert [one["root"] for one in found if one["kind"] == "recv"] == receipts
        assert bucket.slot("own").tolist() == [1.0] * 10
        assert bucket.slot("right").tolist() == [7.0 if len(ranks) == 2 else 0.0] * 10


def test_encoded_neighbours_send_one_message() -> None:
    rig = Rig()
    bucket = rig.weights(
        Plan((Neighbours(WEIGHT, "own", "left", "right", codec="fp16"),)), slots=["own", "left", "right"]
    )
    for number, parameter in enumerate(bucket.views(WEIGHT)):
        parameter.copy_(torch.arange(6.0).view(2, 3) if number == 0 else torch.arange(6.0, 10.0))
    bucket.start()
    sent = [one for one in rig.connection.submitted if one["kind"] == "send"]
    assert {(one["dtype"], one["count"]) for one in sent} == {("uint8", 20)} and len({one["src"] for one in sent}) == 1
    left, right = (one["dst"][0] for one in rig.connection.submitted if one["kind"] == "recv")
    rig.memory[left - 1].copy_(torch.full((10,), 3.0, dtype=torch.float16).view(torch.uint8))
    rig.memory[right - 1].copy_(torch.full((10,), 4.0, dtype=torch.float16).view(torch.uint8))
    bucket.join()
    assert bucket.slot("left").tolist() == [3.0] * 10 and bucket.slot("right").tolist() == [4.0] * 10
    assert bucket.slot("own").tolist() == list(range(10))


def test_everywhere_sends_what_the_codec_leaves() -> None:
    rig = Rig()
    bucket = rig.gradients(Plan((AllReduce(codec="onebit", everywhere=True),)))
    for slot in bucket.entries:
        slot.parameter.grad = torch.arange(float(slot.parameter.numel())).view(slot.parameter.shape)
    bucket.start()
    (request,) = rig.connection.submitted
    sent = rig.memory[request["src"][0] - 1]
    assert len(set(sent[:10].tolist())) == 1 and sent[10:].tolist() == [1.0, 1.0, 0.0]
    assert request["count"] == 13 and request["codec"] == 7
    bucket.join()


def test_parameters_are_copied_for_steps_that_need_them_in_one_piece() -> None:
    rig = Rig()
    double = Local(lambda bucket: bucket.slot(WEIGHT).mul_(2), reads=(WEIGHT,), writes=(WEIGHT,))
    bucket = rig.weights(Plan((double, MEAN)))
    memory = [parameter.data_ptr() for parameter in bucket.tensors]
    bucket.start()
    bucket.join()
    assert all(bool((parameter == 2).all()) for parameter in bucket.tensors)
    assert [parameter.data_ptr() for parameter in bucket.tensors] == memory
    assert [view.data_ptr() for view in bucket.views(WEIGHT)] == memory
    with pytest.raises(BaguaError, match="BG307"):
        bucket.slot(WEIGHT)


def test_parameters_may_have_other_memory_in_each_step_but_no_other_shape() -> None:
    bucket = Rig().weights(Plan((MEAN,)))
    first, second = bucket.tensors
    first.data = torch.full((2, 3), 5.0)  # as loading a checkpoint may do
    bucket.start()
    assert bucket.region(WEIGHT).flat.tolist() == [5.0] * 6 + [1.0] * 4
    bucket.join()
    second.data = torch.ones(1)
    with pytest.raises(BaguaError, match="Parameter b was"):
        bucket.start()


def test_steps_that_use_views_need_no_copy_of_the_weights() -> None:
    rig = Rig()
    take = Local(lambda bucket: copy_weights(bucket, "m"), reads=(WEIGHT,), writes=("m",))
    give = Local(lambda bucket: set_weights(bucket, "m"), reads=("m",), writes=(WEIGHT,))
    bucket = rig.weights(Plan((take, AllReduce("AVG", "m", "m"), give)), slots=["m"])
    bucket.start()
    bucket.slot("m").mul_(2)
    bucket.join()
    assert all(bool((parameter == 2).all()) for parameter in bucket.tensors) and len(rig.memory) == 1


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (AllReduce("AVG", WEIGHT, "no"), "no slot 'no'. It has: weight, own"),
        (AllReduce("AVG", WEIGHT, "own"), "communicated=False"),
        (AllReduce("AVG", WEIGHT, "short"), "slots of one length"),
        (Local(lambda bucket: None, reads=("gone",)), "no slot 'gone'"),
    ],
)
def test_plans_that_do_not_fit_the_slots(step: Any, words: str) -> None:
    bucket = Rig().weights(Plan((MEAN,)))
    bucket.add_slot("own", communicated=False)
    bucket.add_slot("short", 3)
    with pytest.raises(ValueError, match=words):
        bucket.set_plan(Plan((step,)))
    with pytest.raises(ValueError, match="3 elements, the parameters 10"):
        bucket.views("short")
    with pytest.raises(ValueError, match="can't have 0 elements"):
        bucket.add_slot("none", 0)


def test_a_root_that_is_not_there() -> None:
    bucket = Rig().weights(Plan((Broadcast(WEIGHT, root=2, over=HOST),)))
    with pytest.raises(ValueError, match="among 2 ranks"):
        bucket.start()


def test_whoever_is_behind_takes_part_in_what_others_have_begun() -> None:
    rig = Rig()
    seen: list[PlanBucket] = []
    bucket = rig.weights(Plan((Local(seen.append), MEAN, MEAN)))
    bucket.start()
    bucket.join()
    bucket.execution.catch_up(1)
    assert len(rig.connection.submitted) == 2
    bucket.execution.catch_up(3)
    assert len(rig.connection.submitted) == 4 and seen == [bucket]
    bucket.release()
    assert rig.connection.waited == [0, 1, 2, 3]


def test_released_buckets_wait_for_what_has_begun_and_run_no_more() -> None:
    rig = Rig()
    bucket = rig.weights(Plan((MEAN,)))
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
def test_what_follows_from_a_plan(
    steps: tuple[Any, ...], path: tuple[int, ...], reaches: bool, again: bool, adding: bool
) -> None:
    plan = Plan(steps)
    assert (tail_path(plan), tail_reaches_all(plan), repeatable(plan), adds_up(plan)) == (path, reaches, again, adding)
