"""A bucket of weights: parameters that are exchanged themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from bagua.algorithms.plan import WEIGHT, Step
from bagua.base.errors import BaguaError
from bagua.torch_api.join.connection import NOWHERE
from bagua.torch_api.train.bucket import Allocate, PlanBucket, Region, region_of, views_like
from bagua.torch_api.train.parameters import refuse_changed


class WeightBucket(PlanBucket):
    """Slot WEIGHT is the parameters.

    ``flatten``: parameters lie in it, one after the other, as long as the bucket lives: a copy of all is one copy.
    Otherwise they keep memory of their own, ``views(WEIGHT)`` is that memory, and steps that name WEIGHT work on a
    copy: one pass over the bucket before each step that reads it and one after each that writes it.
    """

    reserved = (WEIGHT,)
    repeats = True

    def __init__(
        self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate, flatten: bool
    ) -> None:
        super().__init__(name, parameters, allocate)
        if flatten:
            _refuse_shared_memory(parameters)
        self.guarded = not flatten
        self._open = flatten
        self._weights = region_of(*allocate(self.elements, self.dtype), self.elements)
        self._parts = views_like(self._weights.flat, self.tensors)
        self._move_in(range(len(self.tensors)) if flatten else ())

    def _move_in(self, indices: Sequence[int]) -> None:
        """These parameters' values go to their parts of the bucket, and from then on lie there."""
        with torch.no_grad():
            for index in indices:
                parameter, part = self.tensors[index], self._parts[index]
                part.copy_(parameter)
                parameter.data = part

    def refresh(self) -> None:
        """Takes in again parameters that have other memory now (``parameter.data = ...``). Raises BaguaError for
        parameters that have another shape, dtype or device."""
        if self.guarded:
            return
        moved = []
        for index, (parameter, part) in enumerate(zip(self.tensors, self._parts, strict=True)):
            if parameter.data_ptr() == part.data_ptr():
                continue
            refuse_changed(self.names[index], parameter, part)
            moved.append(index)
        self._move_in(moved)

    def slot(self, name: str) -> torch.Tensor:
        """See ``PlanBucket.slot``. Raises BaguaError for WEIGHT where parameters have memory of their own, but inside a
        ``Local`` step that names it."""
        if name == WEIGHT:
            if not self._open:
                raise BaguaError(
                    "With do_flatten=False there is no flat tensor of the parameters outside of Local steps that name "
                    f"{WEIGHT!r} in reads or writes: use views({WEIGHT!r}), or wrap the model with do_flatten=True. "
                    "[BG307]"
                )
            self.refresh()
        return super().slot(name)

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """See ``PlanBucket.views``; those of WEIGHT are the parameters."""
        if name != WEIGHT:
            return super().views(name)
        self.refresh()
        return [tensor.detach() for tensor in self.tensors]

    def region(self, name: str, side: int) -> Region:
        """See ``PlanBucket.region``."""
        return self._weights if name == WEIGHT else super().region(name, side)

    def open(self, step: Step) -> None:
        """Where parameters have memory of their own: copies them for a step that needs them."""
        if WEIGHT in step.reads or WEIGHT in step.writes:
            self._open = True
            torch._foreach_copy_(self._parts, [tensor.detach() for tensor in self.tensors])

    def shut(self, step: Step, changed: bool) -> None:
        """Where parameters have memory of their own: they get the values that the step has made."""
        self._open = False
        if changed and WEIGHT in step.writes:
            torch._foreach_copy_([tensor.detach() for tensor in self.tensors], self._parts)

    def release(self) -> None:
        """Parameters get ordinary memory again and keep their values."""
        if not self.guarded:
            for parameter, part in zip(self.tensors, self._parts, strict=True):
                if parameter.data_ptr() == part.data_ptr():
                    parameter.data = part.clone()
        super().release()
        self._parts.clear()
        self._weights = region_of(torch.empty(0), NOWHERE, 0)


def _refuse_shared_memory(parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises BaguaError if two parameters share memory without being one object: moving them would part them."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + _span(tensor), name) for name, tensor in parameters)
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            raise BaguaError(
                f"Parameters {name} and {other} share memory without being the same object, so that they can't be "
                "moved: pass do_flatten=False. [BG601]"
            )


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
