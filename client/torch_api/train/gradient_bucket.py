"""A bucket: gradients that travel together, in two buffers that can be communicated.

One buffer holds the contributions of a step, its results land in the other, and then they change roles: ``.grad`` is a
view of the results, so that accumulating into it makes the next contribution. A plan that takes gradients from where
autograd left them (FRESH) has no use for contributions: ``.grad`` stays what it is until there is a result. Behind the
gradients lies a tail of the same dtype: one element per parameter, which says whether this rank has a gradient for it,
and one that asks for the step to be reduced again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.algorithms.plan import FRESH, GRADIENT, RESULT, Plan
from bagua.torch_api.compat.operations import BucketOperations
from bagua.torch_api.train.bucket import Allocate, Region, region_of, views_like
from bagua.torch_api.train.dataflow import repeatable, tail_path, tail_reaches_all

BUFFERS = 2  # contributions and results

# Smaller gradients are copied together when their bucket is complete: one call is cheaper than many. A larger one is
# copied as it comes, while it is in the cache and other ranks still compute.
ALONE_BYTES = 64 << 10


def elements_needed(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of one buffer of a bucket with gradients of these tensors: they, and the tail."""
    return sum(tensor.numel() for tensor in tensors) + len(tensors) + 1


class Slot:
    """One parameter's place in a bucket.

    ``views``: its gradient in both buffers. ``ready``: this backward filled it. ``carried``: ``.grad`` is, or began
    as, a result, which is the same on all ranks. ``aside``: the carried gradient while backward makes a new one.
    """

    __slots__ = ("alone", "aside", "bucket", "carried", "index", "name", "parameter", "ready", "views")
    views: tuple[torch.Tensor, ...]

    def __init__(self, name: str, parameter: torch.Tensor, bucket: GradientBucket, index: int) -> None:
        self.name = name
        self.parameter = parameter
        self.bucket = bucket
        self.index = index
        self.alone = parameter.numel() * parameter.element_size() > ALONE_BYTES
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
            view.copy_(_content(self.name, gradient))
            parameter.grad = view

    def fresh(self) -> torch.Tensor:
        """The gradient of this pass where it lies, in dtype and strides of ``views``. What lies otherwise is copied."""
        view = self.views[self.bucket.side]
        if self.index in self.bucket.absent:
            return view.zero_()
        assert self.parameter.grad is not None
        gradient = _content(self.name, self.parameter.grad)
        alike = gradient.dtype == view.dtype and gradient.stride() == view.stride()
        return gradient if alike else view.copy_(gradient)


def _content(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """What is copied of a gradient: under create_graph=True it has a history, which ends in a bucket. Raises
    NotImplementedError for a sparse one."""
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"Parameter {name} got a sparse gradient ({gradient.layout}), which can't be reduced: make it with "
            "sparse=False, or put the name into the module's _bagua_params_and_buffers_to_ignore."
        )
    return gradient.detach() if gradient.requires_grad else gradient


class GradientBucket(BucketOperations):
    """``side`` is the number of the buffer that holds contributions. ``pending`` counts slots not ready in this
    backward.

    ``copies``: the plan wants contributions in one piece. ``repeatable``: it may run twice on the same gradients.
    ``shows``: it fills RESULT. ``informed``: every rank sees in the tail whether any rank wants that.
    """

    sides = BUFFERS
    reserved = (FRESH, GRADIENT, RESULT)
    scattered = (FRESH,)

    def __init__(self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate) -> None:
        super().__init__(name, parameters, allocate)
        self.slots = [Slot(label, parameter, self, index) for index, (label, parameter) in enumerate(parameters)]
        self.room = len(self.slots) + 1
        self.buffers = tuple(
            region_of(*allocate(self.elements + self.room, self.dtype), self.elements) for _ in range(BUFFERS)
        )
        self.pending = len(self.slots)
        self.absent: list[int] = []
        self.copies = True
        self.repeatable = self.shows = self.informed = True
        self._told_by = RESULT  # the slot whose tail has what all ranks said
        for slot, *views in zip(self.slots, *(views_like(one.flat, self.tensors) for one in self.buffers), strict=True):
            slot.views = tuple(views)

    def release(self) -> None:
        """Gradients that somebody still holds stay readable. Slot and bucket hold each other."""
        super().release()
        for slot in self.slots:
            slot.views, slot.aside = (), None
        self.buffers = ()

    def region(self, name: str, side: int) -> Region:
        """See ``PlanBucket.region``: contributions lie in one buffer, results in the other."""
        if name == GRADIENT:
            return self.buffers[side]
        if name == FRESH:
            raise ValueError(f"{FRESH!r} of bucket {self.name} does not lie in one piece: use views({FRESH!r}).")
        return self.buffers[1 - side] if name == RESULT else super().region(name, side)

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """See ``PlanBucket.views``; FRESH is valid in ``Local`` steps, before the plan communicates."""
        return [slot.fresh() for slot in self.slots] if name == FRESH else super().views(name)

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

    def complete(self, again: bool, drop_carried: bool) -> None:
        """Makes the contribution whole: gradients that have not been copied yet, among them what was accumulated in
        earlier passes for parameters that this one did not reach; zeros for those without any gradient (or with a
        carried one that another rank gives); and the tail."""
        self.absent = []
        views, gradients = [], []
        side = self.side
        for slot in self.slots:
            gradient = slot.parameter.grad
            view = slot.views[side]
            if gradient is None or (slot.carried and drop_carried and not slot.ready):
                self.absent.append(slot.index)
                if self.copies:
                    view.zero_()
            elif gradient is not view and self.copies:
                views.append(view)
                gradients.append(_content(slot.name, gradient))
        if views:
            torch._foreach_copy_(views, gradients)
        tail = self.buffers[side].tail
        tail.fill_(1)
        for index in self.absent:
            tail[index] = 0
        if not again:
            tail[-1] = 0

    def asks_again(self) -> bool:
        """Whether any rank asked for the step to be reduced again. False if no rank can know it of the others."""
        return self.informed and bool(self.region(self._told_by, self.side).tail[-1] > 0)

    def show_results(self, keep_own_memory: bool) -> None:
        """``.grad`` of every parameter that got a gradient on any rank becomes the result, and the buffers change
        roles. A plan that fills no result leaves ``.grad`` as it is.

        Waits, on a device, where this rank has no gradient for a parameter: others may have one."""
        self.pending = len(self.slots)
        if not self.shows:
            for slot in self.slots:
                slot.ready = False
            return
        result = 1 - self.side
        missing = frozenset[int]()
        if self.absent:
            presence = self.region(self._told_by, self.side).tail.tolist()
            missing = frozenset(index for index in self.absent if presence[index] == 0)
        for slot in self.slots:
            slot.ready = False
            if slot.index in missing:
                continue
            slot.carried = True
            parameter, view = slot.parameter, slot.views[result]
            if not keep_own_memory:
                parameter.grad = view
            elif parameter.grad is None or parameter.grad.requires_grad:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)
        self.side = result
