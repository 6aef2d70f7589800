"""Exchanges gradients while backward still computes: their buckets, and the reducer that fills and starts these.

Buckets are submitted in their order on every rank, each as soon as it and all before it are full; the last one always
at the end of the pass, because it also carries whether some rank wants the pass reduced again. That happens when a
parameter got a second gradient in a pass after its bucket was submitted (reentrant checkpointing of shared parameters);
from then on nothing is submitted before the end.

The first pass is different: nothing is submitted before its end, and the order in which gradients came is recorded, so
that buckets can be made again in that order before anything is exchanged, and before error feedback has kept anything.

The result is the reduction of ``.grad`` as it stands at the end of the pass. Gradients that earlier passes
accumulated take part: several passes per step give the same result as in one process.

A bucket: gradients that travel together, in two buffers that can be communicated.

One buffer holds the contributions of a step, its results land in the other, and then they change roles: ``.grad`` is a
view of the results, so that accumulating into it makes the next contribution. A plan that takes gradients from where
autograd left them (FRESH) has no use for contributions: ``.grad`` stays unchanged until there is a result. Behind the
gradients lies a tail of the same dtype: one element per parameter, which says whether this rank has a gradient for it,
and one that asks for the step to be reduced again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.algorithms.plan import FRESH, GRADIENT, RESULT, Plan
from bagua.base.errors import BaguaError
from bagua.torch_api.join.connection import Times
from bagua.torch_api.train.bucket import Allocate, PlanBucket, Region, region_of, views_like
from bagua.torch_api.train.dataflow import repeatable, tail_path, tail_reaches_all
from bagua.torch_api.train.execution import AllIn, StartOrder, Work, join_all, nothing_follows
from bagua.torch_api.train.parameters import refuse_changed
from bagua.torch_api.train.phases import RESULTS, WAIT, WATCH, phase

BUFFERS = 2  # contributions and results

# Smaller gradients are copied together when their bucket is complete: one call is cheaper than many. A larger one is
# copied as it comes, while it is in the cache and other ranks still compute. On a device all of a bucket are copied
# together: a launch takes the host longer than the copy takes the device.
ALONE_BYTES = 64 << 10


def elements_needed(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of one buffer of a bucket with gradients of these tensors: they, and the tail."""
    return sum(tensor.numel() for tensor in tensors) + len(tensors) + 1


class Entry:
    """One parameter's place in a bucket.

    ``views``: its gradient in both buffers. ``ready``: this backward filled it. ``carried``: ``.grad`` is, or began
    as, a result, which is the same on all ranks. ``aside``: the carried gradient while backward makes a new one.
    ``alone``: it is copied by itself, as it comes; ``moves``: with the others, and its own memory is given back then.
    """

    __slots__ = ("alone", "aside", "bucket", "carried", "index", "moves", "name", "parameter", "ready", "views")
    views: tuple[torch.Tensor, ...]

    def __init__(self, name: str, parameter: torch.Tensor, bucket: GradientBucket, index: int) -> None:
        self.name = name
        self.parameter = parameter
        self.bucket = bucket
        self.index = index
        large = parameter.numel() * parameter.element_size() > ALONE_BYTES
        self.alone, self.moves = large and not bucket.on_device, large and bucket.on_device
        self.ready = False
        self.carried = False
        self.aside: torch.Tensor | None = None
        self.views = ()

    def store(self) -> None:
        """Copies the gradient to where contributions lie, unless it lies there. From then on ``.grad`` is that view."""
        parameter = self.parameter
        gradient = parameter.grad
        view = self.views[self.bucket.side]
        if gradient is not view and self.bucket.copies:
            assert gradient is not None
            if gradient.layout is not torch.strided:
                raise sparse_gradient(self.name, gradient)
            try:
                # Under create_graph=True it has a history, which ends here.
                view.copy_(gradient.detach() if gradient.requires_grad else gradient)
                parameter.grad = view
            except (RuntimeError, TypeError):
                self.bucket.refuse_changed()
                raise

    def fresh(self) -> torch.Tensor:
        """The gradient of this pass where it lies, in dtype and strides of ``views``. One with others is copied."""
        view = self.views[self.bucket.side]
        if self.index in self.bucket.absent:
            return view.zero_()
        assert self.parameter.grad is not None
        gradient = self.parameter.grad.detach()
        if gradient.layout is not torch.strided:
            raise sparse_gradient(self.name, gradient)
        alike = gradient.dtype == view.dtype and gradient.stride() == view.stride()
        return gradient if alike else view.copy_(gradient)


def sparse_gradient(name: str, gradient: torch.Tensor) -> NotImplementedError:
    """The error for a gradient that is no dense tensor."""
    return NotImplementedError(
        f"Parameter {name} got a sparse gradient ({gradient.layout}), which can't be reduced: make it with "
        "sparse=False, or put the name into the module's _bagua_params_and_buffers_to_ignore. [BG601]"
    )


class GradientBucket(PlanBucket):
    """``side`` is the number of the buffer that holds contributions. ``pending`` counts entries not ready in this
    backward. ``again``: this rank asks for the step to be reduced again. ``drop_carried``: results of earlier passes
    take part on other ranks only.

    ``copies``: the plan wants contributions in one piece. ``repeatable``: it may run twice on the same gradients.
    ``shows``: it fills RESULT. ``informed``: every rank sees in the tail whether any rank wants that.
    ``keep_own_memory``: ``.grad`` stays where autograd made it.
    """

    sides = BUFFERS
    reserved = (FRESH, GRADIENT, RESULT)
    scattered = (FRESH,)
    repeats = starts_alone = True

    def __init__(self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate) -> None:
        super().__init__(name, parameters, allocate)
        self.entries = [Entry(label, parameter, self, index) for index, (label, parameter) in enumerate(parameters)]
        self.room = len(self.entries) + 1
        self.buffers = tuple(
            region_of(*allocate(self.elements + self.room, self.dtype), self.elements) for _ in range(BUFFERS)
        )
        self.pending = len(self.entries)
        self._all_there = torch.ones_like(self.buffers[0].tail)  # the tail where no gradient is absent
        self._all_there[-1] = 0
        self.absent: list[int] = []
        self.again = self.drop_carried = self.keep_own_memory = False
        self.copies = True
        self.repeatable = self.shows = self.informed = True
        self._told_by = RESULT  # the slot whose tail holds the answers of all ranks
        for entry, *views in zip(
            self.entries, *(views_like(one.flat, self.tensors) for one in self.buffers), strict=True
        ):
            entry.views = tuple(views)

    def release(self) -> None:
        """Gradients that somebody still holds stay readable. Entry and bucket hold each other."""
        super().release()
        for entry in self.entries:
            entry.views, entry.aside = (), None
        self.buffers = ()

    def region(self, name: str, side: int) -> Region:
        """See ``PlanBucket.region``: contributions lie in one buffer, results in the other."""
        if name == GRADIENT:
            return self.buffers[side]
        if name == FRESH:
            raise ValueError(
                f"{FRESH!r} of bucket {self.name} does not lie in one piece: use views({FRESH!r}). [BG307]"
            )
        return self.buffers[1 - side] if name == RESULT else super().region(name, side)

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """See ``PlanBucket.views``; FRESH is valid in ``Local`` steps, before the plan communicates."""
        return [entry.fresh() for entry in self.entries] if name == FRESH else super().views(name)

    def set_plan(self, plan: Plan) -> None:
        """See ``PlanBucket.set_plan``. Runs by itself: when the bucket is full, and at the end of backward."""
        super().set_plan(plan)
        read = {name for step in plan.steps for name in step.reads}
        self.copies = FRESH not in read or GRADIENT in read
        # On a device the host does not wait to see whether any rank asks for a second run: there is none.
        self.repeatable = repeatable(plan) and not self.on_device
        self.shows = any(RESULT in step.writes for step in plan.steps)
        path = tail_path(plan)
        self._told_by = plan.steps[max(path)].writes[0] if path else RESULT
        self.informed = tail_reaches_all(plan) and not self.on_device

    def start(self) -> None:
        """Makes the contribution whole, and runs the plan.

        Gradients come in that have not been copied yet, among them those that earlier passes accumulated for
        parameters that this one did not reach; zeros for parameters without any gradient (or with a carried one that
        another rank gives); and the tail.
        """
        self.absent = []
        side = self.side
        tail = self.buffers[side].tail
        # A device is given all in one launch. It is not given numbers of Python's: the host would wait for it.
        views, gradients = [tail], [self._all_there]
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entry in self.entries:
            gradient = entry.parameter.grad
            view = entry.views[side]
            if gradient is None or (entry.carried and self.drop_carried and not entry.ready):
                self.absent.append(entry.index)
                if self.copies:
                    view.zero_()
            elif gradient is not view and self.copies:
                if gradient.layout is not torch.strided:
                    raise sparse_gradient(entry.name, gradient)
                views.append(view)
                gradients.append(gradient.detach() if gradient.requires_grad else gradient)
                if entry.moves and not self.keep_own_memory:
                    moved.append((entry.parameter, view))
        try:
            torch._foreach_copy_(views, gradients)
            for parameter, view in moved:
                parameter.grad = view
        except (RuntimeError, TypeError):
            self.refuse_changed()
            raise
        for index in self.absent:
            tail[index].zero_()
        if self.again:
            tail[-1].fill_(1)
        self.execution.start()

    def refuse_changed(self) -> None:
        """Raises BaguaError if a parameter has another shape, dtype or device than when the model was wrapped. Asked
        for where torch refuses a gradient: to compare all of them in each step would take time."""
        for entry in self.entries:
            refuse_changed(entry.name, entry.parameter, entry.views[0])

    def asks_again(self) -> bool:
        """Whether any rank asked for the step to be reduced again. False if no rank can know it of the others."""
        return self.informed and self.region(self._told_by, self.side).tail[-1].item() > 0

    def show_results(self) -> None:
        """``.grad`` of every parameter that got a gradient on any rank becomes the result, and the buffers change
        roles. A plan that fills no result leaves ``.grad`` as it is.

        Waits, on a device, where this rank has no gradient for a parameter: others may have one."""
        self.pending = len(self.entries)
        if not self.shows:
            for entry in self.entries:
                entry.ready = False
            return
        result = 1 - self.side
        missing = frozenset[int]()
        if self.absent:
            presence = self.region(self._told_by, self.side).tail.tolist()
            missing = frozenset(index for index in self.absent if presence[index] == 0)
        for entry in self.entries:
            entry.ready = False
            if entry.index in missing:
                continue
            entry.carried = True
            parameter, view = entry.parameter, entry.views[result]
            if not self.keep_own_memory:
                try:
                    parameter.grad = view
                except (RuntimeError, TypeError):
                    self.refuse_changed()
                    raise
            elif parameter.grad is None or parameter.grad.requires_grad:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)
        self.side = result


Rearrange = Callable[[list[str]], Sequence[GradientBucket] | None]


class GradientReducer:
    """One per wrapped model; driven by the thread that runs backward.

    ``before_exchange``: called, if set, at the first gradient of each pass that is exchanged. ``factor``: results are
    multiplied by it before they are shown.
    """

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
        self._drop_carried = drop_carried
        self._keep_own_memory = keep_own_memory
        self.use(buckets)
        self._rearrange = rearrange
        self._arrivals: list[str] = []  # of the first pass, while it is recorded
        self._on_finished = on_finished
        self._clock = clock
        self._early = True  # submit before the end of the pass
        self._again = False
        self._touched = False  # a gradient came in this pass
        self.before_exchange: Work | None = None
        self.factor = 1.0
        self._repeatable = all(bucket.repeatable for bucket in self.buckets)
        self._aside: list[Entry] = []

    def use(self, buckets: Sequence[GradientBucket]) -> None:
        """From the next pass on, or from the end of the one that is recorded, these are exchanged."""
        self.buckets = list(buckets)
        self._order = StartOrder(self.buckets)
        self._entries: dict[str, Entry] = {entry.name: entry for bucket in buckets for entry in bucket.entries}
        for bucket in buckets:
            bucket.drop_carried, bucket.keep_own_memory = self._drop_carried, self._keep_own_memory

    def weigh(self) -> None:
        """In an elastic job: before a pass accumulates more."""

    def set_aside(self, name: str, _: torch.Tensor) -> None:
        """A gradient of this parameter has been computed and will be accumulated next, if this pass accumulates at all.

        Needed for sums alone: the result of an earlier pass, which all ranks share, must count once.
        """
        entry = self._entries[name]
        if entry.carried and self._drop_carried:
            entry.aside, entry.parameter.grad = entry.parameter.grad, None
            entry.carried = False
            self._aside.append(entry)

    def end_pass(self) -> None:
        """Called at the end of every pass, before ``finish``: carried gradients that got nothing come back."""
        for entry in self._aside:
            if entry.parameter.grad is None:
                entry.parameter.grad = entry.aside
                entry.carried = True
            entry.aside = None
        self._aside.clear()

    def mark_ready(self, name: str, parameter: torch.Tensor) -> None:
        """The gradient of this parameter has been accumulated: it goes to its place, and a full bucket goes out."""
        entry = self._entries.get(name)
        if entry is None:
            return
        if self._rearrange is not None:
            self._record(entry)
            return
        if entry.alone and not self._keep_own_memory:
            entry.store()
        bucket = entry.bucket
        if entry.ready:
            self._again = self._again or self._order.started > self.buckets.index(bucket)
            return
        if not self._touched:
            self._touched = True
            if self.before_exchange is not None:
                self.before_exchange()
        entry.ready = True
        bucket.pending -= 1
        if bucket.pending:
            return
        if (sink := WATCH.sink) is not None:
            sink.ready(bucket.name)
        if self._early:
            self._order.start_full(len(self.buckets) - 1)

    def shadow(self) -> None:
        """This rank has no gradients, and others have: the next ``finish`` takes part in their exchange."""
        self.forget()
        self._touched = True

    def forget(self) -> None:
        """No parameter has a gradient any more."""
        for entry in self._entries.values():
            entry.parameter.grad, entry.carried = None, False

    def _record(self, entry: Entry) -> None:
        """A gradient came in the first pass. It stays where it is until the pass ends."""
        if not self._touched:
            self._touched = True
            if self.before_exchange is not None:
                self.before_exchange()
        if not entry.ready:
            entry.ready = True
            self._arrivals.append(entry.name)
        elif not self._repeatable:
            self._early = False  # a second gradient: there will be one in later passes, too

    def _end_recording(self, rearrange: Rearrange) -> None:
        """All gradients of the first pass are there: they go into buckets that have their order."""
        self._rearrange = None
        arrivals, self._arrivals = self._arrivals, []
        buckets = rearrange(arrivals)
        if buckets is not None:
            self.use(buckets)
        for name in arrivals:
            entry = self._entries[name]
            entry.ready = False
            self.mark_ready(name, entry.parameter)

    def finish(self) -> None:
        """Ends the pass: submits the rest, waits for all, shows the results. Nothing if no gradient came.

        Raises BaguaError if a gradient came too late for a plan that can't be run again.
        """
        if not self._touched:
            return
        times, begin = self._exchange()
        end = self._clock()
        with phase(RESULTS):
            for bucket in self.buckets:
                if self.factor != 1.0 and bucket.shows:
                    bucket.slot(RESULT).mul_(self.factor)
                bucket.show_results()
        self._begin_anew()
        if self._on_finished is not None:
            self._on_finished(times, begin, end)

    def _exchange(self) -> tuple[list[Times], Any]:
        """Submits the rest, and waits for all. Returns times of operations, and when waiting began."""
        if self._rearrange is not None:
            self._end_recording(self._rearrange)
        self.buckets[-1].again = self._again
        all_in = self._start_rest()
        begin = self._clock()
        with phase(WAIT):
            times = join_all(self.buckets, all_in)
        last = self.buckets[-1]
        if last.asks_again() if last.informed else self._again:
            self._refuse_late()
            self._early = False
            self._order.started = 0
            all_in = self._start_rest()
            times += join_all(self.buckets, all_in)
        return times, begin

    def _start_rest(self) -> AllIn:
        """Submits what is left. Returns what ``join_all`` is to ask."""
        self._order.start_rest()
        return nothing_follows

    def _refuse_late(self) -> None:
        """A gradient came too late on some rank, so that all reduce again. Raises BaguaError where that can't be."""
        last = self.buckets[-1]
        if not (self._repeatable and last.informed):
            self.abandon()
            raise BaguaError(
                "On some rank a parameter got a second gradient in one backward pass after its bucket had been "
                "exchanged (as reentrant checkpointing of shared parameters does it). It can't be done again: this "
                "algorithm changes its state as it exchanges, or the model is on a GPU, where no rank waits to ask the "
                "others. Use checkpoint(..., use_reentrant=False). [BG604]"
            )

    def abandon(self) -> bool:
        """Forgets a pass that ended by an exception. True if parts of it had been exchanged already: then the other
        ranks apply a step that this one did not make."""
        under_way = self._order.started > 0
        self.end_pass()
        for bucket in self.buckets:
            bucket.execution.abandon()
            bucket.pending = len(bucket.entries)
            for entry in bucket.entries:
                entry.ready = False
        self._begin_anew()
        return under_way

    def _begin_anew(self) -> None:
        self._order.started = 0
        self.buckets[-1].again = False
        self._arrivals.clear()
        self._again = self._touched = False
