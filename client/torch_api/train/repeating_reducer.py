"""The reducer of an elastic job: a backward pass is exchanged again when a member was lost in the middle of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.torch_api.join.connection import Times
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.gradients import GradientBucket, GradientReducer, Rearrange
from bagua.torch_api.train.runner import Runner


class RepeatingReducer(GradientReducer):
    """A pass is a unit (``comm/commit.py``). Contributions stay as they are until it is committed.

    A loss inside backward is no error: gradients go on accumulating, and ``finish`` exchanges all buckets again.
    """

    def __init__(
        self, runner: Runner, layout: ModelBuckets, buckets: Sequence[GradientBucket], *settings: Any, **named: Any
    ) -> None:
        super().__init__(buckets, *settings, **named)
        self._runner = runner
        self._layout = layout
        self._may_start_early = True
        self._recorded: tuple[Rearrange, list[str]] | None = None
        runner.session.renew_with(self)

    def renew(self) -> None:
        """In a new generation: the rest of this pass is not exchanged before its end."""
        if self._early:
            self._early = False
            self._may_start_early = False

    def _exchange(self) -> tuple[list[Times], Any]:
        return self._runner.together(self._attempt, self._start_over, self._conclude)

    def _attempt(self) -> tuple[list[Times], Any]:
        if any(bucket.execution.lost for bucket in self.buckets):
            self._start_over()
        return super()._exchange()

    def _end_recording(self, rearrange: Rearrange) -> None:
        self._recorded = rearrange, list(self._arrivals)
        super()._end_recording(rearrange)

    def _start_over(self) -> None:
        for bucket in self.buckets:
            bucket.execution.rewind()
        self._order.started = 0
        if self._recorded is not None:
            self._rearrange, self._arrivals = self._recorded[0], list(self._recorded[1])
            self._layout.forget_arrival()
            for bucket in self.buckets:
                bucket.pending = len(bucket.entries)

    def _conclude(self) -> None:
        for bucket in self.buckets:
            bucket.execution.conclude()
        self._recorded = None
        if not self._may_start_early:
            self._early = self._may_start_early = True
