"""Divides a rank's steps into computation, exposed communication and communication hidden behind computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bagua.torch_api.job.connection import Times
from bagua.torch_api.job.recent_steps import RecentSteps


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
            total += stop - start
            inside += max(0, min(stop, end) - max(start, begin))
            reached = stop
    return total, inside


def _nobody(steps: int) -> None:
    """Nobody wants to know."""


class StatisticsRecorder:
    """Adds up steps. One per process; steps come from one thread at a time. Times in ns of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.recent = RecentSteps()
        self.on_step: Callable[[int], None] = _nobody  # gets the number of steps after each
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
        self.on_step(self._steps)

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
