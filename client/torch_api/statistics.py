"""How much communication a rank did, and how much of it hid behind computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.torch_api.connection import Times


@dataclass(frozen=True)
class Statistics:
    """What ``communication.statistics()`` returns. Seconds and steps are this rank's, bytes are those of its host's
    engine.

    ``steps`` counts backward passes that synchronised. ``comm_seconds`` is the time in which at least one bucket of
    such a pass was being reduced, ``exposed_seconds`` the part of it for which this rank stood waiting.
    """

    steps: int
    comm_seconds: float
    exposed_seconds: float
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


class StatisticsRecorder:
    """Adds up steps. One per process; steps come from one thread at a time."""

    def __init__(self) -> None:
        self._steps = self._comm_ns = self._exposed_ns = 0

    def add_step(self, operations: Sequence[Times], wait_begin: int, wait_end: int) -> None:
        """Times of the operations of one step, and the interval in which the rank waited for them; ns."""
        total, exposed = union_length([(started, done) for _, started, done in operations], wait_begin, wait_end)
        self._steps += 1
        self._comm_ns += total
        self._exposed_ns += exposed

    def summary(self, counters: Mapping[str, int]) -> Statistics:
        """The sums so far, with the engine's counters."""
        return Statistics(
            steps=self._steps,
            comm_seconds=self._comm_ns / 1e9,
            exposed_seconds=self._exposed_ns / 1e9,
            bytes_local=counters["bytes_local"],
            bytes_sent=counters["bytes_sent"],
            bytes_received=counters["bytes_received"],
        )
