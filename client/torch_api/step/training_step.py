"""The training step: gradients go out while backward still computes, and results come back at its end.

Buckets are submitted in their order on every rank, each as soon as it and all before it are full; the last one always
at the end of the pass, because it also carries whether some rank wants the pass reduced again. That happens when a
parameter got a second gradient in a pass after its bucket was submitted (reentrant checkpointing of shared parameters);
from then on nothing is submitted before the end.

The first pass may be different (``rearrange``): nothing is submitted before its end, and the order in which gradients
came is recorded, so that buckets can be made again in that order before anything is exchanged, and before error
feedback has kept anything.

The result is the reduction of ``.grad`` as it stands at the end of the pass. Gradients that earlier passes
accumulated take part: several passes per step give the same result as in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.algorithms.plan import RESULT
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.commit.flags import Flags
from bagua.torch_api.job.connection import Record, Times
from bagua.torch_api.step.earlier_results import EarlierResults
from bagua.torch_api.step.execution import Work, join_all
from bagua.torch_api.step.gradients import Entry, GradientBucket, may_change, scale_gradients, version_of
from bagua.torch_api.step.phases import RESULTS, WAIT, WATCH, phase
from bagua.torch_api.step.vote import Vote

Rearrange = Callable[[list[str], bool], Sequence[GradientBucket] | None]
UNSETTLED = -1
"""No generation: buckets go out at the end of the pass."""
Arrivals = dict[str, tuple[torch.Tensor | None, int]]
"""Parameters in the order in which their gradients came, with these and their versions."""


def out_of_step() -> BaguaError:
    """The error after a pass that ended by an exception, where other ranks may count parts of it."""
    return BaguaError(
        "The last backward pass ended by an exception after part of its gradients had been exchanged. The ranks are no "
        "longer in step: start the job again (in a notebook: launch again), and check what may raise before backward "
        "begins. [BG604]"
    )


class TrainingStep:
    """The step of one wrapped model, driven by the thread that runs backward.

    A pass is a unit (``comm/commit/ledger.py``). Losing a member inside backward is no error: gradients go on
    accumulating, and ``finish`` exchanges all buckets again. ``before_exchange``: called, if set, at the first gradient
    of each pass that is exchanged. ``factor``: results are multiplied by it before they are shown. ``touched``: this
    pass is exchanged.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        vote: Vote | None = None,
        earlier: EarlierResults | None = None,
        on_finished: Record | None = None,
        rearrange: Rearrange | None = None,
        clock: Callable[[], Any] = time.monotonic_ns,
    ) -> None:
        """``vote``: None: members stay. ``earlier``: for plans that add up.

        ``rearrange``: gets the names of parameters in the order in which their gradients came in the first pass, and
        whether it is called again because a member was lost. It returns other buckets for the same parameters, or None
        to keep those that there are.
        """
        self._vote = Vote() if vote is None else vote
        self._earlier = earlier
        self.use(buckets)
        self._rearrange = rearrange
        self._arrivals: Arrivals = {}  # of the first pass, while it is recorded
        self._recorded: tuple[Rearrange, Arrivals] | None = None  # for a repeat of the pass, until it counts
        self._on_finished = on_finished
        self._clock = clock
        self._goes_early = True  # submit before the end of the pass
        self._generation = self._vote.generation  # in which buckets of this pass go out before its end
        self.weight = self._vote.weight  # of the gradients that have been accumulated
        self.touched = False
        self.before_exchange: Work | None = None
        self.factor = 1.0

    def use(self, buckets: Sequence[GradientBucket]) -> None:
        """Exchanges these buckets from the next pass on, or from the end of the one that is recorded."""
        self.buckets = list(buckets)
        self._may_run_twice = all(bucket.may_run_twice for bucket in buckets)
        self._started = 0  # buckets of this pass
        self._entries: dict[str, Entry] = {entry.name: entry for bucket in buckets for entry in bucket.entries}
        if self._earlier is not None:
            self._earlier.look()
        for bucket in buckets:
            bucket.earlier = self._earlier

    # Inside backward

    def begin_pass(self, generation: int, weight: float) -> None:
        """In an elastic job: buckets go out early only while the job is in ``generation``, and if their slots already
        fit its members. Gradients of earlier passes are scaled from the former ``weight`` to this one."""
        self._generation = UNSETTLED if self._vote.renewal.changed else generation
        if self._earlier is not None:
            self._earlier.look()  # another thread may have entered this generation since the last pass
        if weight != self.weight:
            self._weigh(weight)

    def _weigh(self, weight: float) -> None:
        before, self.weight = self.weight, weight
        scale_gradients((one.parameter for one in self._entries.values()), weight / before)
        for bucket in self.buckets:
            bucket.unstage()
        for name, (gradient, version) in self._arrivals.items():  # the change is ours, and not the program's
            self._arrivals[name] = gradient, version + 1

    def mark_ready(self, name: str, parameter: torch.Tensor) -> None:
        """The gradient of this parameter has been accumulated: it goes to its place, and a full bucket goes out."""
        entry = self._entries.get(name)
        if entry is None:
            return
        if not self.touched:
            self.touch()
        if self._rearrange is not None:
            self._record(entry)
            return
        bucket = entry.bucket
        # Its bucket has gone: what came now is not in it.
        if entry.ready and self._started > self.buckets.index(bucket):
            self.buckets[-1].second_run = True
            return
        early = self._goes_early and not may_change(parameter)
        if entry.alone and early:
            entry.stage()
        if entry.ready:
            return
        entry.ready = True
        bucket.pending -= 1
        if bucket.pending:
            return
        if (sink := WATCH.sink) is not None:
            sink.ready(bucket.name)
        if early and self._generation == self._vote.generation:
            # The last bucket waits: it also carries whether some rank wants a second run.
            while self._started < len(self.buckets) - 1 and not self.buckets[self._started].pending:
                self.buckets[self._started].start()
                self._started += 1

    def touch(self) -> None:
        """Gradients are exchanged in this pass, also if one came that is in no bucket."""
        if not self.touched:
            self.touched = True
            if self.before_exchange is not None:
                self.before_exchange()

    def _record(self, entry: Entry) -> None:
        """A gradient came in the first pass. It stays where it is until the pass ends."""
        if not entry.ready:
            entry.ready = True
        elif not self._may_run_twice:
            self._goes_early = False  # a second gradient: there will be one in later passes, too
        self._arrivals[entry.name] = entry.parameter.grad, version_of(entry.parameter.grad)

    # At its end

    def finish(self) -> None:
        """Ends the pass: submits the rest, waits for all, shows the results. Nothing if no gradient came.

        Raises BaguaError if a gradient came too late for a plan that can't be run again.
        """
        if not self.touched:
            return
        sent = self._send_with_last() if self._vote.repeats else None
        try:
            unit = self._vote.unit(steps=True)
            while True:
                with unit:  # losing a member ends the block, and the next generation is entered
                    if unit.repeated:
                        self._vote.begin_again()
                        self._undo()
                    if not unit.settled:
                        times, begin = self._exchange()
                    unit.vote()
                    end = self._show()
                    break
        except BaseException:
            if sent is not None:  # Ctrl-C may come before the unit begins; dropping twice does no harm
                sent.drop()
            raise
        if self._on_finished is not None:
            self._on_finished(times, begin, end)

    def _send_with_last(self) -> Flags | None:
        """Submits the last bucket with the vote's flags, if only that is left: while it is reduced there is time for
        the rest. Returns them if they are under way."""
        begun = self._goes_early and self._rearrange is None and self._started == len(self.buckets) - 1
        if not begun or self._generation != self._vote.generation:
            return None
        flags = self._vote.attach(self.buckets)
        if flags is None:
            return None
        try:
            if self._generation == self._vote.generation:  # from now on no thread enters another one
                self._start_rest()
        except BaseException:
            flags.sent_along()
            flags.drop()
            raise
        return flags if flags.sent_along() else None

    def _start_rest(self) -> None:
        """Submits the buckets that are left. The caller waits for them next: an only one may need no daemon."""
        only = self.buckets[0].execution.single if len(self.buckets) == 1 else None
        if only is not None:
            only.waited_for = True
        try:
            while self._started < len(self.buckets):
                self.buckets[self._started].start()
                self._started += 1
        finally:
            if only is not None:
                only.waited_for = False

    def _exchange(self) -> tuple[list[Times], Any]:
        """Submits the rest, and waits for all. Returns times of operations, and when waiting began."""
        if self._vote.repeats:
            for bucket in self.buckets:
                if bucket.execution.lost:  # a member was lost inside backward
                    self._undo()
                    break
            else:
                if self._earlier is not None and self._generation != self._vote.generation:
                    for bucket in self.buckets:  # another rank may have to bring earlier results now
                        bucket.unstage()
            if self._vote.weight != self.weight:
                self._weigh(self._vote.weight)
            if self._vote.renewal.changed:
                self._vote.renewal.follow()  # gradients are exchanged in any case
        if self._earlier is not None:
            self._earlier.look()
        if self._rearrange is not None:
            self._replay_first_pass(self._rearrange)
        self._start_rest()
        begin = self._clock()
        with phase(WAIT):
            times = join_all(self.buckets, self._vote.send_flags)
        if self.buckets[-1].wants_second_run():  # a second gradient came too late on some rank
            self._refuse_late(self._may_run_twice and self.buckets[-1].informed)
            self._goes_early = False  # it will come late in later passes, too
            self._started = 0
            for bucket in self.buckets:
                bucket.unstage()
            self._start_rest()
            times += join_all(self.buckets, self._vote.send_flags)
        return times, begin

    def _replay_first_pass(self, rearrange: Rearrange) -> None:
        """Puts the gradients of the first pass, which are all there, into buckets that have their order."""
        again, self._recorded = self._recorded is not None, (rearrange, dict(self._arrivals))
        self._rearrange = None
        arrivals, self._arrivals = self._arrivals, {}
        for name, (gradient, version) in arrivals.items():
            if self._entries[name].parameter.grad is not gradient or version_of(gradient) != version:
                self._goes_early = False  # hooks of the program change it after ours came, and will again
        buckets = rearrange(list(arrivals), again)
        if buckets is not None:
            self.use(buckets)
        for name in arrivals:
            entry = self._entries[name]
            entry.ready = False
            self.mark_ready(name, entry.parameter)

    def _refuse_late(self, again: bool) -> None:
        """A gradient came too late on some rank. Raises BaguaError unless all can reduce ``again``."""
        if not again:
            self.abandon()
            raise BaguaError(
                "On some rank a parameter got a second gradient in one backward pass after its bucket had been "
                "exchanged (as reentrant checkpointing of shared parameters does it). It can't be done again: this "
                "algorithm changes its state as it exchanges, step_in_backward=True has moved parameters, or the model "
                "is on a GPU, where no rank waits to ask the others. Use checkpoint(..., use_reentrant=False); in a "
                "Trainer of transformers that is gradient_checkpointing_kwargs={'use_reentrant': False}. [BG604]"
            )

    def _show(self) -> Any:
        """The exchange counts: plans end, and ``.grad`` becomes the result. Returns when waiting had ended."""
        if self._vote.repeats:
            for bucket in self.buckets:
                bucket.execution.conclude()
            self._vote.renewal.settle()
        self._recorded = None
        end = self._clock()
        with phase(RESULTS):
            for bucket in self.buckets:
                if self.factor != 1.0 and bucket.shows:
                    bucket.slot(RESULT).mul_(self.factor)
                bucket.show_results()
        self._begin_anew()
        return end

    # Passes that did not come to their end

    def _undo(self) -> None:
        """Goes back to before the exchange: it is made again, from the gradients that this rank has."""
        for bucket in self.buckets:
            bucket.execution.rewind()
            bucket.unstage()
        self._started = 0
        if self._recorded is not None:  # the first pass counts as recorded only when its unit does
            self._rearrange, self._arrivals = self._recorded[0], dict(self._recorded[1])
            for bucket in self.buckets:
                bucket.pending = len(bucket.entries)

    def shadow(self) -> None:
        """Takes part in the exchange of others, which have gradients where this rank has none, at the next
        ``finish``."""
        self.clear_gradients()
        self.touched = True

    def clear_gradients(self) -> None:
        """Sets ``.grad`` of all parameters to None."""
        for entry in self._entries.values():
            entry.parameter.grad = None

    def abandon(self) -> bool:
        """Forgets a pass that ended by an exception. True if parts of it had been exchanged already: then the other
        ranks apply a step that this one did not make."""
        under_way = self._started > 0
        for bucket in self.buckets:  # a run that nobody finished is not to be in ``starts``
            bucket.execution.rewind()
            bucket.end_pass()
        self._begin_anew()
        return under_way

    def _begin_anew(self) -> None:
        self._started = 0
        self.buckets[-1].second_run = False
        self._arrivals.clear()
        self.touched = False
