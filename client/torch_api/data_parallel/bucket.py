"""A bucket: gradients that travel together, in two buffers that the daemon sees.

One buffer holds the contributions of a step, its results land in the other, and then they change roles: ``.grad`` is a
view of the results, so that accumulating into it makes the next contribution. Behind the gradients lies a tail of the
same dtype: one element per parameter, which says whether this rank has a gradient for it, and one that asks for the
step to be reduced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua.algorithms import Plan
from bagua.algorithms.plan import GRADIENT, RESULT
from bagua.base.errors import ConfigError
from bagua.torch_api.connection import Place

Allocate = Callable[[int, torch.dtype], tuple[torch.Tensor, Place]]

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

    def __init__(self, name: str, parameter: torch.Tensor, bucket: Bucket, index: int) -> None:
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
        if gradient is not view:
            assert gradient is not None
            view.copy_(_without_history(gradient))
            parameter.grad = view


def _without_history(gradient: torch.Tensor) -> torch.Tensor:
    """Under create_graph=True gradients have a history, which ends in a bucket."""
    return gradient.detach() if gradient.requires_grad else gradient


class Bucket:
    """``side`` is the number of the buffer that holds contributions. ``pending`` counts slots not ready in this
    backward."""

    def __init__(self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate) -> None:
        self.name = name
        self.label = f"bucket {name}"[:47]
        self.dtype = parameters[0][1].dtype
        self.slots = [Slot(label, parameter, self, index) for index, (label, parameter) in enumerate(parameters)]
        self.elements = sum(parameter.numel() for _, parameter in parameters)
        self.count = elements_needed(self.tensors)
        made = [allocate(self.count, self.dtype) for _ in range(BUFFERS)]
        self.places = (made[0][1], made[1][1])
        self.tails = (made[0][0][self.elements :], made[1][0][self.elements :])
        self.side = 0
        self.pending = len(self.slots)
        self.absent: list[int] = []
        self.plan: Plan | None = None
        offset = 0
        for slot in self.slots:
            slot.views = tuple(_view_like(buffer, offset, slot.parameter) for buffer, _ in made)
            offset += slot.parameter.numel()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters, in order."""
        return [slot.parameter for slot in self.slots]

    def release(self) -> None:
        """Lets go of the memory now, rather than when the garbage collector comes by: slot and bucket hold each other.

        Gradients that somebody still holds stay readable. The bucket can't be used any more.
        """
        for slot in self.slots:
            slot.views, slot.aside = (), None
        self.tails = (torch.empty(0), torch.empty(0))

    def set_plan(self, plan: Plan) -> None:
        """What happens to the bucket once every local rank has filled it. Raises ConfigError for what can't be run."""
        slots = {name for step in plan.steps for name in (step.src, step.dst)}
        if len(plan.steps) != 1 or slots != {GRADIENT, RESULT}:
            raise ConfigError(f"This version runs plans of one step from {GRADIENT!r} to {RESULT!r}, not {plan}.")
        self.plan = plan

    def place(self, slot_name: str) -> Place:
        """Where a state slot of the plan lies: (segment, byte offset)."""
        return self.places[self.side if slot_name == GRADIENT else 1 - self.side]

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
                view.zero_()
                self.absent.append(slot.index)
            elif gradient is not view:
                views.append(view)
                gradients.append(_without_history(gradient))
        if views:
            torch._foreach_copy_(views, gradients)
        tail = self.tails[self.side]
        tail.fill_(1)
        for index in self.absent:
            tail[index] = 0
        if not again:
            tail[-1] = 0

    def asks_again(self) -> bool:
        """Whether any rank asked for the step to be reduced again; read from the results."""
        return bool(self.tails[1 - self.side][-1] > 0)

    def show_results(self, keep_own_memory: bool) -> None:
        """``.grad`` of every parameter that got a gradient on any rank becomes the result, and the buffers change
        roles."""
        result = 1 - self.side
        missing = frozenset[int]()
        if self.absent:
            presence = self.tails[result].tolist()
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
        self.pending = len(self.slots)


def _view_like(buffer: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """``parameter.numel()`` elements of ``buffer`` in the shape of ``parameter``, and in its strides where these are
    dense: optimizers are fastest when both agree."""
    strides = parameter.stride() if _is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
    return torch.as_strided(buffer, parameter.shape, strides, buffer.storage_offset() + offset)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill numel() places without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
