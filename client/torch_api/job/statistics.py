"""Divides a rank's steps into computation, exposed communication and communication hidden behind computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bagua.proto.common_pb2 import StepShares
from bagua.torch_api.job.connection import Times

WEIGHT = 0.1  # of the newest step in averages: some twenty steps count
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class StepTimes:
    """Time of one step, or of several, by what it went into. Step time = computation + exposed communication.

    A step ends when a backward pass that synchronised has its results, and begins where the step before it ended; the
    first one begins with the first forward pass in training. Communication runs while at least one bucket of the step
    is being reduced: from the moment when all ranks of this host have submitted it until its result is there.

    ``exposed_seconds``: communication for which this rank stood waiting. ``hidden_seconds``: communication that ran
    while this rank computed. ``compute_seconds``: everything else but exposed communication: forward, backward,
    optimizer and data loading of this rank, and its waits for slower ranks of its host.
    """

    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float

    @property
    def step_seconds(self) -> float:
        """Computation and exposed communication together."""
        return self.compute_seconds + self.exposed_seconds


@dataclass(frozen=True)
class Statistics:
    """The result of ``communication.statistics()``. Seconds and steps are this rank's, bytes are those of its host's
    engine.

    ``steps`` counts backward passes that synchronised. ``comm_seconds`` is the time in which at least one bucket of
    such a pass was being reduced: ``exposed_seconds``, for which this rank stood waiting, and ``hidden_seconds``, while
    it computed. ``compute_seconds`` is the rest of the steps' time. All are sums over steps; ``last_step`` has the
    figures of the newest (None before the first). ``StepTimes`` defines them.
    """

    steps: int
    comm_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    compute_seconds: float
    last_step: StepTimes | None
    bytes_local: int
    bytes_sent: int
    bytes_received: int

    @property
    def hidden_share(self) -> float:
        """Share of communication that hid behind computation, 0 to 1; 1 if there was none."""
        return 1.0 - self.exposed_seconds / self.comm_seconds if self.comm_seconds > 0 else 1.0


def union_length(intervals: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """(length of the union of intervals, length of its part inside [begin, end])."""
    total = inside = 0
    reached = -(1 << 63)
    for start, stop in sorted(intervals):
        start = max(start, reached)
        if stop > start:
            total += stop - start  # parts that overlap count once
            inside += max(0, min(stop, end) - max(start, begin))
            reached = stop
    return total, inside


class RecentSteps:
    """Averages of what a rank's recent steps wait for. Old steps fade, so that they follow the present. One thread at
    a time adds; any may read. Times in ns."""

    def __init__(self) -> None:
        self._steps = 0
        self._compute = self._ranks = self._exposed = self._hidden = 0.0
        self._exchanges: list[float] = []  # for how long each was waited for, in the order of waiting

    def add(self, operations: Sequence[Times], wait_begin: int, wait_end: int, step: tuple[int, int, int]) -> None:
        """A step, as (computation, exposed, hidden): see ``StepTimes``. What is not exposed of the wait was for ranks
        of this host, which had not submitted yet."""
        compute, exposed, hidden = step
        self._steps += 1
        weight = max(WEIGHT, 1 / self._steps)  # the first steps count alike: zero is no value to begin with
        ranks = max(0, wait_end - wait_begin - exposed)
        self._compute += weight * (compute - ranks - self._compute)
        self._ranks += weight * (ranks - self._ranks)
        self._exposed += weight * (exposed - self._exposed)
        self._hidden += weight * (hidden - self._hidden)
        if len(operations) != len(self._exchanges):  # buckets were cut anew
            self._exchanges = [0.0] * len(operations)
        reached = wait_begin
        for number, (_, _, done) in enumerate(operations):
            waited = max(0, min(done, wait_end) - reached)
            reached = max(reached, done)
            self._exchanges[number] += weight * (waited - self._exchanges[number])

    def shares(self) -> StepShares | None:
        """Averages in ms; None before the first step."""
        if not self._steps:
            return None
        exchanges = list(self._exchanges)  # a copy: the training's thread adds
        longest = max(range(len(exchanges)), key=exchanges.__getitem__, default=0)
        return StepShares(
            compute_ms=self._compute / _NS_PER_MS,
            ranks_ms=self._ranks / _NS_PER_MS,
            exposed_ms=self._exposed / _NS_PER_MS,
            hidden_ms=self._hidden / _NS_PER_MS,
            exchange=longest + 1,
            exchanges=len(exchanges),
        )


class StatisticsRecorder:
    """Adds up steps. One per process; steps come from one thread at a time. Times in ns of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.recent = RecentSteps()
        self.on_step: Callable[[int], None] = lambda _: None  # gets ``done`` after each step
        self.before = 0  # steps that the others had done when this rank joined them
        self.waited_ns = 0  # for results, those of slower ranks included
        self._steps = self._comm_ns = self._exposed_ns = self._compute_ns = 0
        self._began: int | None = None
        self._last: tuple[int, int, int] | None = None  # computation, exposed, hidden

    def begin_step(self, now: int) -> None:
        """A forward pass in training begins. Counts for the first step alone: later ones begin where one ended."""
        if self._began is None:
            self._began = now

    def add_step(self, operations: Sequence[Times], wait_begin: int, wait_end: int) -> None:
        """Times of the operations of one step, and the interval in which the rank waited for them."""
        total, exposed = union_length([(started, done) for _, started, done in operations], wait_begin, wait_end)
        began = wait_begin if self._began is None else min(self._began, wait_begin)
        compute = wait_end - began - exposed
        self._steps += 1
        self.waited_ns += wait_end - wait_begin
        self._comm_ns += total
        self._exposed_ns += exposed
        self._compute_ns += compute
        self._began = wait_end
        self._last = compute, exposed, total - exposed
        self.recent.add(operations, wait_begin, wait_end, self._last)
        self.on_step(self.done)

    @property
    def done(self) -> int:
        """Steps of the job, as far as this rank has taken part or was told."""
        return self.before + self._steps

    def last_step(self) -> StepTimes | None:
        """The figures of the newest step."""
        last = self._last
        return StepTimes(*(ns / 1e9 for ns in last)) if last is not None else None

    def summary(self, counters: Mapping[str, int]) -> Statistics:
        """The sums so far, with the engine's counters."""
        return Statistics(
            steps=self._steps,
            comm_seconds=self._comm_ns / 1e9,
            exposed_seconds=self._exposed_ns / 1e9,
            hidden_seconds=(self._comm_ns - self._exposed_ns) / 1e9,
            compute_seconds=self._compute_ns / 1e9,
            last_step=self.last_step(),
            bytes_local=counters["bytes_local"],
            bytes_sent=counters["bytes_sent"],
            bytes_received=counters["bytes_received"],
        )
