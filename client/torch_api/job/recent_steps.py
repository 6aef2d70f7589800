"""Averages of what a rank's recent steps wait for. They forget, so that they tell of the present."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.proto.common_pb2 import StepShares
from bagua.torch_api.job.connection import Times

WEIGHT = 0.1
"""Of the newest step: some twenty steps count."""
_NS_PER_MS = 1e6


class RecentSteps:
    """Newest steps of one rank. One thread at a time adds; any may read. Times in ns."""

    def __init__(self) -> None:
        self._steps = 0
        self._compute = self._ranks = self._exposed = self._hidden = 0.0
        self._exchanges: list[float] = []  # for how long each was waited for, in the order of waiting

    def add(self, operations: Sequence[Times], wait_begin: int, wait_end: int, step: tuple[int, int, int]) -> None:
        """A step, as (computation, exposed, hidden): see ``StepTimes``. What is not exposed of the wait was for ranks
        of this host, which had not submitted yet."""
        compute, exposed, hidden = step
        self._steps += 1
        weight = max(WEIGHT, 1 / self._steps)
        ranks = max(0, wait_end - wait_begin - exposed)
        self._compute += weight * (compute - ranks - self._compute)
        self._ranks += weight * (ranks - self._ranks)
        self._exposed += weight * (exposed - self._exposed)
        self._hidden += weight * (hidden - self._hidden)
        if len(operations) != len(self._exchanges):
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
        exchanges = list(self._exchanges)
        longest = max(range(len(exchanges)), key=exchanges.__getitem__, default=0)
        return StepShares(
            compute_ms=self._compute / _NS_PER_MS,
            ranks_ms=self._ranks / _NS_PER_MS,
            exposed_ms=self._exposed / _NS_PER_MS,
            hidden_ms=self._hidden / _NS_PER_MS,
            exchange=longest + 1,
            exchanges=len(exchanges),
        )
