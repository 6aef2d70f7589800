"""The reducer of an elastic job: a backward pass is exchanged again when a member was lost in the middle of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.torch_api.join.connection import Times
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.execution import AllIn
from bagua.torch_api.train.gradients import Arrivals, GradientBucket, GradientReducer, Rearrange, scale_gradients
from bagua.torch_api.train.runner import Runner


class RepeatingReducer(GradientReducer):
    """A pass is a unit (``comm/commit/ledger.py``). Contributions stay as they are until it is committed.

    A loss inside backward is no error: gradients go on accumulating, and ``finish`` exchanges all buckets again.
    """

    def __init__(
        self,
        runner: Runner,
        layout: ModelBuckets,
        buckets: Sequence[GradientBucket],
        **settings: Any,
    ) -> None:
        super().__init__(buckets, **settings)
        self._runner = runner
        self._weighed = runner.session.weighed  # as gradients are that have been accumulated
        self._layout = layout
        self._may_start_early = True
        self._sent: AllIn | None = None  # the last bucket has been submitted, with the flags
        self._recorded: tuple[Rearrange, Arrivals] | None = None
        runner.session.renew_with(self)

    def renew(self) -> None:
        """In a new generation: the rest of this pass is not exchanged before its end."""
        if self._early:
            self._early = False
            self._may_start_early = False

    def _exchange(self) -> tuple[list[Times], Any]:
        last = len(self.buckets) - 1
        if self._early and self._rearrange is None and self._order.started == last:
            # While it is reduced there is time for the rest.
            self.buckets[last].again = self._again
            self._sent = self._runner.start_last(self.buckets, self._start_last)
        try:
            return self._runner.together(self._attempt, self._start_over, self._conclude, steps=True)
        finally:
            if self._sent is not None:  # an exception like that of Ctrl-C, before the unit had begun
                self._sent = None
                self._runner.drop_flags()

    def _start_last(self) -> None:
        if self._early:  # asked again: from now on no thread enters a generation
            self._order.start_rest()

    def weigh(self) -> None:
        """Gradients that have been accumulated weigh as much as those that follow."""
        change, self._weighed = self._runner.session.weighed / self._weighed, self._runner.session.weighed
        if change != 1.0:
            scale_gradients((one.parameter for bucket in self.buckets for one in bucket.entries), change)
            for bucket in self.buckets:
                bucket.unstage()

    def _attempt(self) -> tuple[list[Times], Any]:
        if self._weighed != self._runner.session.weighed:
            self.weigh()
        if self._earlier is not None:
            self._earlier.look()
        for bucket in self.buckets:
            if bucket.execution.lost:
                self._start_over()
                break
        self._runner.may_repeat()  # algorithm and slots follow; gradients are exchanged in any case
        return super()._exchange()

    def _start_rest(self) -> AllIn:
        sent, self._sent = self._sent, None
        if sent is not None:
            return sent
        self._order.start_rest()
        return self._runner.all_in

    def _end_recording(self, rearrange: Rearrange) -> None:
        self._recorded = rearrange, dict(self._arrivals)
        super()._end_recording(rearrange)

    def _start_over(self) -> None:
        self._sent = None
        for bucket in self.buckets:
            bucket.execution.rewind()
            bucket.unstage()
        self._order.started = 0
        if self._recorded is not None:
            self._rearrange, self._arrivals = self._recorded[0], dict(self._recorded[1])
            self._layout.forget_arrival()
            for bucket in self.buckets:
                bucket.pending = len(bucket.entries)

    def _conclude(self) -> None:
        for bucket in self.buckets:
            bucket.execution.conclude()
        self._recorded = None
        self._runner.settle()
        if not self._may_start_early:
            self._early = self._may_start_early = True
