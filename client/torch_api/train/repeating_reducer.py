"""The reducer of an elastic job: a backward pass is exchanged again when a member was lost in the middle of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.base.errors import MembershipChanged
from bagua.torch_api.join.connection import Times
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.execution import AllIn
from bagua.torch_api.train.gradients import GradientBucket, GradientReducer, Rearrange
from bagua.torch_api.train.runner import Runner


class RepeatingReducer(GradientReducer):
    """A pass is a unit (``comm/commit.py``). Contributions stay as they are until it is committed.

    A loss inside backward is no error: gradients go on accumulating, and ``finish`` exchanges all buckets again.
    """

    def __init__(
        self,
        runner: Runner,
        layout: ModelBuckets,
        adding: bool,
        buckets: Sequence[GradientBucket],
        **settings: Any,
    ) -> None:
        """``adding``: results grow with the number of ranks."""
        super().__init__(buckets, **settings)
        self._runner = runner
        self._adding = adding
        self._weighed = runner.session.weighed  # as gradients are that have been accumulated
        self._dropped = False  # a result of an earlier pass takes no part on this rank in this one
        self._first = self._first_member() if adding else -1
        self._layout = layout
        self._may_start_early = True
        self._sent: AllIn | None = None  # the last bucket has been submitted, with the flags
        self._recorded: tuple[Rearrange, list[str]] | None = None
        runner.session.renew_with(self)

    def renew(self) -> None:
        """In a new generation: the rest of this pass is not exchanged before its end."""
        if self._early:
            self._early = False
            self._may_start_early = False

    def set_aside(self, name: str, gradient: torch.Tensor) -> None:
        """See ``GradientReducer``."""
        super().set_aside(name, gradient)
        if self._aside and not self._dropped:
            self._dropped = _counts(self._aside[-1].aside)

    def _first_member(self) -> int:
        return self._runner.session.membership.members[self._runner.everyone.ranks[0]]

    def _follow_rank(self) -> None:
        """Results of earlier passes take part in a sum on rank 0 alone, which may be another one now. Raises
        MembershipChanged, on all ranks, where they are gone with it."""
        before, self._first = self._first, self._first_member()
        self._drop_carried = self._runner.everyone.rank() != 0
        for bucket in self.buckets:
            bucket.drop_carried = self._drop_carried
        if before == self._first or not self._dropped:
            return
        self._dropped = False
        self._start_over()
        self.abandon()
        raise MembershipChanged(
            "Rank 0 was lost, and with it the sum of this step's earlier backward passes, which it alone brings to the "
            "last one. All ranks that are left are told so: leave out the optimizer's step, and go on with the next "
            "one. With no_sync() for all passes of a step but the last, or with average=True, no step is lost. [BG508]"
        )

    def _exchange(self) -> tuple[list[Times], Any]:
        last = len(self.buckets) - 1
        if self._early and not self._adding and self._rearrange is None and self._order.started == last:
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
            found = [one.parameter.grad for bucket in self.buckets for one in bucket.entries]
            with torch.no_grad():
                torch._foreach_mul_([gradient.detach() for gradient in found if gradient is not None], change)

    def _attempt(self) -> tuple[list[Times], Any]:
        if self._weighed != self._runner.session.weighed:
            self.weigh()
        if self._adding:
            self._dropped = self._dropped or any(
                entry.carried and not entry.ready and _counts(entry.parameter.grad)
                for bucket in self.buckets
                for entry in bucket.entries
            )
            self._follow_rank()
        for bucket in self.buckets:
            if bucket.execution.lost:
                self._start_over()
                break
        self._runner.may_repeat()  # algorithm and slots follow; gradients are exchanged in any case
        return super()._exchange()

    def _start_rest(self) -> AllIn:
        """See ``GradientReducer``."""
        sent, self._sent = self._sent, None
        if sent is not None:
            return sent
        self._order.start_rest()
        return self._runner.all_in

    def _end_recording(self, rearrange: Rearrange) -> None:
        self._recorded = rearrange, list(self._arrivals)
        super()._end_recording(rearrange)

    def _start_over(self) -> None:
        self._sent = None
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
        self._dropped = False
        self._runner.settle()
        if not self._may_start_early:
            self._early = self._may_start_early = True


def _counts(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())
