"""Exchanges gradients while backward still computes: the state of one backward pass after the other.

Buckets are submitted in their order on every rank, each as soon as it and all before it are full; the last one always
at the end of the pass, because it also carries whether some rank wants the pass reduced again. That happens when a
parameter got a second gradient in a pass after its bucket was submitted (reentrant checkpointing of shared parameters);
from then on nothing is submitted before the end.

The first pass is different: nothing is submitted before its end, and the order in which gradients came is recorded, so
that buckets can be made again in that order before anything is exchanged, and before error feedback has kept anything.

The result is the reduction of ``.grad`` as it stands at the end of the pass. What earlier passes accumulated takes
part: several passes per step give what they give in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.join.connection import Times
from bagua.torch_api.train.bucket import join_all
from bagua.torch_api.train.gradient_bucket import GradientBucket, Slot

Rearrange = Callable[[list[str]], Sequence[GradientBucket] | None]


class GradientReducer:
    """One per wrapped model; driven by the thread that runs backward."""

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        keep_own_memory: bool = False,
        drop_carried: bool = False,
        on_finished: Callable[[Sequence[Times], Any, Any], None] | None = None,
        rearrange: Rearrange | None = None,
        clock: Callable[[], Any] = time.monotonic_ns,
    ) -> None:
        """``drop_carried``: results of earlier passes, which are the same on all ranks, take part on other ranks only.
        A sum over ranks needs it (on all ranks but one); a mean doesn't.

        ``rearrange``: gets, once, the names of parameters in the order in which their gradients came in the first pass.
        It returns other buckets for the same parameters, or None to keep those that there are. ``on_finished``: gets
        the times of a pass's operations, and when waiting for them began and ended by ``clock``.
        """
        self._use(buckets)
        self._rearrange = rearrange
        self._arrivals: list[str] = []  # of the first pass, while it is recorded
        self._keep_own_memory = keep_own_memory
        self._drop_carried = drop_carried
        self._on_finished = on_finished
        self._clock = clock
        self._early = True  # submit before the end of the pass
        self._started = 0  # so many buckets, in their order, in this pass
        self._again = False
        self._touched = False  # a gradient came in this pass
        self._repeatable = all(bucket.repeatable for bucket in self.buckets)
        self._aside: list[Slot] = []

    def _use(self, buckets: Sequence[GradientBucket]) -> None:
        self.buckets = list(buckets)
        self._slots: dict[str, Slot] = {slot.name: slot for bucket in buckets for slot in bucket.slots}

    def set_aside(self, name: str, _: torch.Tensor) -> None:
        """A gradient of this parameter has been computed and will be accumulated next, if this pass accumulates at all.

        Needed for sums alone: the result of an earlier pass, which all ranks share, must count once.
        """
        slot = self._slots[name]
        if slot.carried and self._drop_carried:
            slot.aside, slot.parameter.grad = slot.parameter.grad, None
            slot.carried = False
            self._aside.append(slot)

    def end_pass(self) -> None:
        """Called at the end of every pass, before ``finish``: carried gradients that got nothing come back."""
        for slot in self._aside:
            if slot.parameter.grad is None:
                slot.parameter.grad = slot.aside
                slot.carried = True
            slot.aside = None
        self._aside.clear()

    def mark_ready(self, name: str, parameter: torch.Tensor) -> None:
        """The gradient of this parameter has been accumulated."""
        slot = self._slots.get(name)
        if slot is None:
            return
        if self._rearrange is not None:
            self._record(slot)
        else:
            self._fill(slot)

    def _fill(self, slot: Slot) -> None:
        """The gradient goes to its place; a full bucket goes out."""
        if slot.alone and not self._keep_own_memory:
            slot.store()
        bucket = slot.bucket
        if slot.ready:
            self._again = self._again or self._started > self.buckets.index(bucket)
            return
        self._touched = True
        slot.ready = True
        bucket.pending -= 1
        if not bucket.pending and self._early:
            self._submit_full()

    def _record(self, slot: Slot) -> None:
        """A gradient came in the first pass. It stays where it is until the pass ends."""
        self._touched = True
        if not slot.ready:
            slot.ready = True
            self._arrivals.append(slot.name)
        elif not self._repeatable:
            self._early = False  # a second gradient: there will be one in later passes, too

    def _end_recording(self, rearrange: Rearrange) -> None:
        """All gradients of the first pass are there: they go into buckets that have their order."""
        self._rearrange = None
        arrivals, self._arrivals = self._arrivals, []
        buckets = rearrange(arrivals)
        if buckets is not None:
            self._use(buckets)
        for name in arrivals:
            slot = self._slots[name]
            slot.ready = False
            self._fill(slot)

    def _submit_full(self) -> None:
        last = len(self.buckets) - 1
        while (number := self._started) < last and not self.buckets[number].pending:
            self._submit(self.buckets[number])

    def _submit(self, bucket: GradientBucket) -> None:
        bucket.complete(self._again, self._drop_carried)
        self._started += 1
        bucket.execution.start()

    def finish(self) -> None:
        """Ends the pass: submits the rest, waits for all, shows the results. Nothing if no gradient came.

        Raises BaguaError if a gradient came too late for a plan that can't be run again.
        """
        if not self._touched:
            return
        if self._rearrange is not None:
            self._end_recording(self._rearrange)
        for bucket in self.buckets[self._started :]:
            self._submit(bucket)
        begin = self._clock()
        times = join_all(self.buckets)
        if self._asks_again():
            self._early = False
            self._started = 0
            for bucket in self.buckets:
                self._submit(bucket)
            times += join_all(self.buckets)
        end = self._clock()
        for bucket in self.buckets:
            bucket.show_results(self._keep_own_memory)
        self._begin_anew()
        if self._on_finished is not None:
            self._on_finished(times, begin, end)

    def _asks_again(self) -> bool:
        """Whether a gradient came too late on some rank, so that all reduce again."""
        last = self.buckets[-1]
        asked = last.asks_again() if last.informed else self._again
        if asked and not (self._repeatable and last.informed):
            self.abandon()
            raise BaguaError(
                "On some rank a parameter got a second gradient in one backward pass after its bucket had been "
                "exchanged (as reentrant checkpointing of shared parameters does it). It can't be done again: this "
                "algorithm changes its state as it exchanges, or the model is on a GPU, where no rank waits to ask the "
                "others. Use checkpoint(..., use_reentrant=False)."
            )
        return asked

    def abandon(self) -> bool:
        """Forgets a pass that ended by an exception. True if parts of it had been exchanged already: then the other
        ranks apply a step that this one did not make."""
        under_way = self._started > 0
        self.end_pass()
        for bucket in self.buckets:
            bucket.execution.abandon()
            bucket.pending = len(bucket.slots)
            for slot in bucket.slots:
                slot.ready = False
        self._begin_anew()
        return under_way

    def _begin_anew(self) -> None:
        self._started = 0
        self._arrivals.clear()
        self._again = self._touched = False
