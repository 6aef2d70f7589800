"""The reducer with ranks as threads: when buckets go, in which order, and what is in them."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
from torch import nn

from bagua.algorithms import AllReduce, Plan
from bagua.algorithms.plan import GRADIENT
from bagua.torch_api.job.connection import Place, Times
from bagua.torch_api.step.earlier_results import EarlierResults
from bagua.torch_api.step.gradients import GradientBucket, GradientHook, scale_gradients
from bagua.torch_api.step.training_step import TrainingStep
from bagua.torch_api.step.vote import Vote
from bagua.torch_api.train.autograd_hooks import BackwardPass


class Meeting:
    """Sums what ranks in threads submit, by the order of submission."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=10)
        self.submitted: list[list[GradientBucket]] = [[] for _ in range(ranks)]


class ThreadRun:
    """One bucket's plan at work on one rank: a reduction of all ranks' buckets, by the order of submission."""

    started = False
    single = None  # no operation of the core

    def __init__(self, meeting: Meeting, rank: int, bucket: GradientBucket) -> None:
        self.meeting = meeting
        self.rank = rank
        self.bucket = bucket
        self.ticket = 0

    def start(self) -> None:
        assert not self.started
        self.started = True
        submitted = self.meeting.submitted[self.rank]
        self.ticket = len(submitted)
        submitted.append(self.bucket)

    def done(self) -> bool:
        return False

    def advance(self, times: list[Times]) -> bool:
        self.started = False
        self.meeting.barrier.wait()
        buckets = [self.meeting.submitted[rank][self.ticket] for rank in range(self.meeting.ranks)]
        assert len({bucket.name for bucket in buckets}) == 1, "ranks are out of step"
        contributions = [whole(bucket) for bucket in buckets]
        scale = self.meeting.ranks if buckets[0].plan == Plan((AllReduce("AVG"),)) else 1
        result = torch.stack(contributions).sum(0) / scale
        self.meeting.barrier.wait()
        whole(self.bucket).copy_(result)
        times.append((0, 1, 2))
        return False

    def abandon(self) -> bool:
        return self.started and not self.advance([])

    rewind = abandon


BUFFERS: dict[int, torch.Tensor] = {}


def allocate(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
    buffer = torch.zeros(count, dtype=dtype)
    number = len(BUFFERS) + 1
    BUFFERS[number] = buffer
    return buffer, (number, 0)


def whole(bucket: GradientBucket) -> torch.Tensor:
    """Contributions, then results, with the tail."""
    return BUFFERS[bucket.region(GRADIENT).place[0]]


SEED_LOCK = threading.Lock()


class Replica:
    """A small model with a reducer, one bucket per layer, last layer first."""

    def __init__(self, meeting: Meeting, rank: int, op: str = "AVG") -> None:
        with SEED_LOCK:  # the generator is the process's
            torch.manual_seed(0)
            self.model = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.buckets = []
        for number, layer in reversed(list(enumerate(self.model))):
            parameters = [(f"{number}.{name}", parameter) for name, parameter in layer.named_parameters()]
            self.buckets.append(GradientBucket(str(number), parameters, allocate))
            self.buckets[-1].set_plan(Plan((AllReduce(op),)))
            self.buckets[-1].execution = ThreadRun(meeting, rank, self.buckets[-1])
        self.finished: list[int] = []
        self.synchronises = True
        self.earlier = EarlierResults(lambda: rank == 0) if op == "SUM" else None
        self.reducer = TrainingStep(
            self.buckets,
            earlier=self.earlier,
            on_finished=lambda times, begin, end: self.finished.append(len(times)),
        )
        for name, parameter in self.model.named_parameters():
            if self.earlier is not None:
                self.earlier.watch(parameter)
            parameter.register_post_accumulate_grad_hook(
                GradientHook(lambda p, n=name: self.reducer.mark_ready(n, p) if self.synchronises else None)
            )

    def gradient(self, layer: int) -> torch.Tensor | None:
        return self.model[layer].weight.grad

    def backward(self, used: list[int], scale: float) -> None:
        x = torch.full((1, 3), scale)
        for number in used:
            x = self.model[number](x)
        x.sum().backward()
        self.reducer.finish()


def together(work: Callable[[Meeting, int], object], ranks: int = 2) -> tuple[Meeting, list[object]]:
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(work, meeting, rank) for rank in range(ranks)]
        for future in as_completed(futures, 30):
            if future.exception() is not None:
                meeting.barrier.abort()  # the others would wait in vain, and their error hide this one
                future.result()
        return meeting, [future.result() for future in futures]


def test_buckets_go_in_order_and_the_last_one_at_the_end() -> None:
    def work(meeting: Meeting, rank: int) -> Replica:
        replica = Replica(meeting, rank)
        slots = {slot.name: slot for bucket in replica.buckets for slot in bucket.entries}
        gone: list[int] = []
        # The middle layer's gradients come first: they wait for those of the last layer.
        for name in ("1.weight", "1.bias", "2.weight", "2.bias", "0.weight", "0.bias"):
            slots[name].parameter.grad = torch.ones_like(slots[name].parameter)
            replica.reducer.mark_ready(name, slots[name].parameter)
            gone.append(len(meeting.submitted[rank]))
        assert gone == [0, 0, 0, 2, 2, 2]
        replica.reducer.finish()
        return replica

    meeting, replicas = together(work)
    assert [[bucket.name for bucket in buckets] for buckets in meeting.submitted] == [["2", "1", "0"]] * 2
    assert all(torch.equal(replica.gradient(0), torch.ones(3, 3)) for replica in replicas)


def test_presence() -> None:
    """Layer 2 is used by nobody, layer 1 by rank 1 alone."""

    def work(meeting: Meeting, rank: int) -> Replica:
        replica = Replica(meeting, rank)
        for _ in range(3):
            replica.model.zero_grad()
            replica.backward([0] if rank == 0 else [0, 1], 1.0)
            assert replica.gradient(2) is None
            alone = Replica(Meeting(1), 0)
            alone.backward([0, 1], 1.0)
            torch.testing.assert_close(replica.gradient(1), alone.gradient(1) / 2)
        return replica

    together(work)


def test_what_was_accumulated_before_takes_part() -> None:
    def work(meeting: Meeting, rank: int) -> torch.Tensor:
        replica = Replica(meeting, rank)
        mine = replica.model[2].weight.grad = torch.full((3, 3), float(rank))  # a pass without synchronisation
        replica.backward([0], 1.0)
        assert replica.gradient(2) is mine, "memory of the program's own"
        return replica.gradient(2)

    _, found = together(work)
    assert all(torch.equal(one, torch.full((3, 3), 0.5)) for one in found)


def test_sums_count_an_earlier_result_once() -> None:
    def work(meeting: Meeting, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        replica = Replica(meeting, rank, op="SUM")
        replica.backward([0, 1, 2], 1.0)
        once = [parameter.grad.clone() for parameter in replica.model.parameters()]
        replica.backward([0, 1], 1.0)
        for number, parameter in enumerate(replica.model.parameters()):
            if number >= 4:
                assert torch.equal(parameter.grad, once[number])
        return once[0], replica.gradient(0)

    _, found = together(work)
    alone = Replica(Meeting(1), 0)
    alone.backward([0, 1], 1.0)
    for first, second in found:
        torch.testing.assert_close(second, first + 2 * alone.gradient(0))


def test_sums_of_several_passes_equal_one_process() -> None:
    """Exchanged passes, one without exchange between them, and a new step that begins with zeros."""

    def work(meeting: Meeting, rank: int) -> list[torch.Tensor]:
        replica = Replica(meeting, rank, op="SUM")
        found = []
        for zeros in (False, True):
            replica.model.zero_grad(set_to_none=not zeros)
            replica.backward([0, 1], 1.0)
            replica.synchronises = False
            (replica.model[0](torch.ones(1, 3)) * (rank + 1)).sum().backward()
            replica.synchronises = True
            replica.backward([0], 1.0)
            found.append(replica.gradient(0).clone())
        return found

    _, found = together(work)
    alone = Replica(Meeting(1), 0)
    alone.backward([0, 1], 1.0)
    expected = 2 * alone.gradient(0)
    alone.model.zero_grad()
    alone.backward([0], 1.0)
    expected += (1 + 2 + 2) * alone.gradient(0)
    for one in found:
        for gradient in one:
            torch.testing.assert_close(gradient, expected)


def test_a_second_gradient_after_submission_makes_all_ranks_reduce_again() -> None:
    def work(meeting: Meeting, rank: int) -> Replica:
        replica = Replica(meeting, rank)
        for step in range(2):
            replica.model.zero_grad()
            for parameter in replica.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            for name, parameter in reversed(list(replica.model.named_parameters())):
                replica.reducer.mark_ready(name, parameter)
            if rank == 1:
                replica.model[2].weight.grad += 3
                replica.reducer.mark_ready("2.weight", replica.model[2].weight)
            early = len(meeting.submitted[rank])
            replica.reducer.finish()
            assert torch.equal(replica.gradient(2), torch.full((3, 3), 2.5))
            assert early == (2 if step == 0 else 6)  # later passes wait for their end
        return replica

    meeting, replicas = together(work)
    assert [len(buckets) for buckets in meeting.submitted] == [9, 9]
    assert [replica.finished for replica in replicas] == [[6, 3], [6, 3]]


def test_the_first_pass_is_recorded_and_goes_out_in_its_own_order() -> None:
    """Layer 1's gradients come first; rank 1 sees another order, and follows what it is told."""

    def work(meeting: Meeting, rank: int) -> list[list[str]]:
        replica = Replica(meeting, rank)
        told: list[list[str]] = []

        def rearrange(arrivals: list[str], _: bool) -> list[GradientBucket]:
            told.append(list(arrivals))
            assert not meeting.submitted[rank]
            order = {"1": 0, "2": 1, "0": 2}
            return sorted(replica.buckets, key=lambda bucket: order[bucket.name])

        replica.reducer = TrainingStep(replica.buckets, rearrange=rearrange)
        names = ["1.weight", "1.bias", "2.bias", "2.weight"]
        for step in range(2):
            for name in names if rank == 0 else names[::-1]:
                parameter = dict(replica.model.named_parameters())[name]
                parameter.grad = torch.full_like(parameter, rank + step)
                replica.reducer.mark_ready(name, parameter)
            assert len(meeting.submitted[rank]) == (5 if step else 0)
            replica.reducer.finish()
            assert torch.equal(replica.gradient(2), torch.full((3, 3), step + 0.5))
            assert replica.gradient(0) is None
        return told

    meeting, told = together(work)
    assert told == [[["1.weight", "1.bias", "2.bias", "2.weight"]], [["2.weight", "2.bias", "1.bias", "1.weight"]]]
    assert [[bucket.name for bucket in buckets] for buckets in meeting.submitted] == [["1", "2", "0"] * 2] * 2


class ElasticVoteOf(Vote):
    """A vote whose generation and members a test changes."""

    def __init__(self, changed: bool) -> None:
        super().__init__()
        self.generation = 1
        self.renewal.changed = changed


@pytest.mark.parametrize(("entered", "changed", "early"), [(1, False, 2), (2, False, 0), (1, True, 0)])
def test_buckets_go_early_in_the_generation_of_their_pass_and_with_slots_of_its_members(
    entered: int, changed: bool, early: int
) -> None:
    """Another thread may enter one between the begin of a pass and its first gradient, or before the algorithm has
    followed the last change."""
    meeting = Meeting(1)
    replica = Replica(meeting, 0)
    vote = ElasticVoteOf(changed)
    replica.reducer = TrainingStep(replica.buckets, vote=vote)
    replica.reducer.begin_pass(vote.generation, 1.0)
    vote.generation = entered
    for number in (2, 1, 0):
        for name, parameter in replica.model[number].named_parameters():
            parameter.grad = torch.ones_like(parameter)
            replica.reducer.mark_ready(f"{number}.{name}", parameter)
    assert len(meeting.submitted[0]) == early
    replica.reducer.finish()
    assert len(meeting.submitted[0]) == 3


def test_a_change_of_weights_in_the_first_pass_is_no_change_by_the_program() -> None:
    meeting = Meeting(1)
    replica = Replica(meeting, 0)
    replica.reducer = TrainingStep(replica.buckets, rearrange=lambda names, again: None)
    for step in range(2):
        for number in (2, 1, 0):
            for name, parameter in replica.model[number].named_parameters():
                parameter.grad = torch.ones_like(parameter)
                replica.reducer.mark_ready(f"{number}.{name}", parameter)
        if step == 0:
            replica.reducer.begin_pass(0, 2.0)
            assert replica.model[1].weight.grad.unique().tolist() == [2.0]
        else:
            assert len(meeting.submitted[0]) == 3 + 2
        replica.reducer.finish()


def test_a_first_pass_that_was_abandoned_is_forgotten() -> None:
    replica = Replica(Meeting(1), 0)
    told: list[list[str]] = []
    replica.reducer = TrainingStep(replica.buckets, rearrange=lambda names, _: told.append(names))
    weight, bias = replica.model[0].weight, replica.model[0].bias
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    replica.reducer.mark_ready("0.weight", weight)
    assert not replica.reducer.abandon()
    replica.reducer.mark_ready("0.bias", bias)
    replica.reducer.mark_ready("0.bias", bias)
    replica.reducer.finish()
    assert told == [["0.bias"]]
    assert torch.equal(bias.grad, torch.ones(3)) and torch.equal(weight.grad, torch.ones(3, 3))


def test_large_gradients_are_copied_as_they_come_and_small_ones_together() -> None:
    large, small = nn.Parameter(torch.zeros(200, 200)), nn.Parameter(torch.zeros(3))
    bucket = GradientBucket("0", [("large", large), ("small", small)], allocate)
    bucket.set_plan(Plan((AllReduce(),)))
    bucket.execution = ThreadRun(Meeting(1), 0, bucket)
    reducer = TrainingStep([bucket])
    for parameter in (large, small):
        parameter.grad = torch.ones_like(parameter)
    reducer.mark_ready("large", large)
    assert [bool(slot.view.all()) for slot in bucket.entries] == [True, False]
    reducer.mark_ready("small", small)
    reducer.finish()
    assert torch.equal(whole(bucket)[:40003], torch.ones(40003))


def test_a_released_bucket_lets_go_of_its_memory_at_once() -> None:
    weight = nn.Parameter(torch.zeros(3))
    freed: list[int] = []

    def allocate_watched(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
        memory = (ctypes.c_char * (count * dtype.itemsize))()
        weakref.finalize(memory, freed.append, count)
        return torch.frombuffer(memory, dtype=dtype), (1, 0)

    gc.disable()  # what it would find must be gone without it
    try:
        bucket = GradientBucket("0", [("a", weight)], allocate_watched)
        bucket.release()
        assert freed == [5]
    finally:
        gc.enable()


def test_a_pass_without_gradients_exchanges_nothing() -> None:
    meeting = Meeting(1)
    replica = Replica(meeting, 0)
    replica.reducer.finish()
    replica.reducer.mark_ready("unknown", replica.model[0].weight)
    replica.reducer.finish()
    assert meeting.submitted == [[]]


def test_an_abandoned_pass_leaves_no_trace() -> None:
    meeting = Meeting(1)
    replica = Replica(meeting, 0)
    weight = replica.model[0].weight
    weight.grad = torch.ones_like(weight)
    replica.reducer.mark_ready("0.weight", weight)
    assert not replica.reducer.abandon()
    for name in ("2.weight", "2.bias"):
        parameter = dict(replica.model.named_parameters())[name]
        parameter.grad = torch.ones_like(parameter)
        replica.reducer.mark_ready(name, parameter)
    assert replica.reducer.abandon()
    replica.backward([0, 1, 2], 1.0)
    assert len(meeting.submitted[0]) == 4


def test_negated_views_are_scaled() -> None:
    parameter = torch.zeros(3)
    parameter.grad = torch._neg_view(torch.ones(3))
    scale_gradients([parameter, torch.zeros(2)], 0.5)
    assert parameter.grad.tolist() == [-0.5] * 3


def test_sparse_gradients_are_scaled() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    scale_gradients([table.weight], 3.0)
    assert table.weight.grad is not None and not table.weight.grad.is_coalesced()
    assert table.weight.grad.to_dense().sum(1).tolist() == [0.0, 12.0, 0.0, 6.0]


def test_views_follow_the_parameters_strides() -> None:
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    weights = [nn.Parameter(image), nn.Parameter(torch.zeros(5))]
    gaps = nn.Parameter(torch.zeros(4, 4)[:, ::2])
    bucket = GradientBucket("0", [("a", weights[0]), ("b", weights[1]), ("c", gaps)], allocate)
    assert [slot.view.stride() for slot in bucket.entries] == [weights[0].stride(), (1,), (2, 1)]
    assert len(whole(bucket)) == 96 + 5 + 8 + 3 + 1
    for number, slot in enumerate(bucket.entries):
        slot.view.fill_(number + 1)
    assert whole(bucket)[:109].tolist() == [1.0] * 96 + [2.0] * 5 + [3.0] * 8
    assert bucket.tensors == [*weights, gaps]


def test_the_private_door_of_autograd_is_where_we_expect_it() -> None:
    """The callback comes once, after every gradient is there, and is let go when a pass fails."""
    weight = nn.Parameter(torch.ones(3))
    passes: list[BackwardPass] = []
    seen: list[bool] = []

    def begin(gradient: torch.Tensor) -> None:
        passes.append(BackwardPass(lambda: seen.append(weight.grad is not None)))
        assert passes[-1].alive()

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    output = weight * 2
    output.register_hook(begin)
    output.sum().backward()
    assert seen == [True] and not passes[-1].alive()

    middle = weight * 2
    middle.register_hook(fail)
    output = middle * 2
    output.register_hook(begin)
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    assert seen == [True] and not passes[-1].alive()

    with pytest.raises(RuntimeError, match="during backward"):
        BackwardPass(lambda: None)
    with pytest.raises(ZeroDivisionError):  # an error in the callback is the caller's
        output = weight * 2
        output.register_hook(lambda gradient: BackwardPass(lambda: 1 // 0) and None)  # type: ignore[arg-type, return-value]
        output.sum().backward()
