"""A bucket whose parameters, not their gradients, are exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.algorithms import Local
from bagua.algorithms.plan import WEIGHT, Step
from bagua.base.errors import BaguaError
from bagua.torch_api.step.bucket import Allocate, PlanBucket, Region, region_of, views_like
from bagua.torch_api.step.parameters import refuse_changed


class WeightBucket(PlanBucket):
    """Slot WEIGHT is the parameters, whose memory is the program's own: ``views(WEIGHT)``.

    A step that needs them in one piece gets a staged copy: one pass over the bucket before it, and one after it if it
    writes them. Steps that use ``views(WEIGHT)`` alone cost neither.
    """

    reserved = (WEIGHT,)
    repeats = guarded = True

    def __init__(self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate) -> None:
        super().__init__(name, parameters, allocate)
        self._staged: Region | None = None
        self._parts: list[torch.Tensor] = []
        self._open = self._copied = False  # a step runs that names WEIGHT; it has a copy

    def slot(self, name: str) -> torch.Tensor:
        """See ``PlanBucket.slot``. Raises BaguaError for WEIGHT, except inside a ``Local`` step that names it."""
        if name == WEIGHT:
            if not self._open:
                raise BaguaError(
                    f"There is no flat tensor of the parameters outside of Local steps that name {WEIGHT!r} in reads "
                    f"or writes: use views({WEIGHT!r}). [BG307]"
                )
            self._copy_in()
        return super().slot(name)

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """See ``PlanBucket.views``; those of WEIGHT are the parameters."""
        return self._parameters() if name == WEIGHT else super().views(name)

    def region(self, name: str) -> Region:
        if name != WEIGHT:
            return super().region(name)
        if self._staged is None:
            self._staged = region_of(*self._allocate(self.elements, self.dtype), self.elements)
            self._parts = views_like(self._staged.flat, self.tensors)
        return self._staged

    def open(self, step: Step) -> None:
        """Allows WEIGHT to a step that names it, and copies the parameters if the step communicates them."""
        self._open = WEIGHT in step.reads or WEIGHT in step.writes
        if WEIGHT in step.reads and not isinstance(step, Local):
            self._copy_in()

    def shut(self, step: Step, changed: bool) -> None:
        """Copies the step's results back into the parameters."""
        # A Local step that used ``views`` alone has changed the parameters themselves.
        if changed and WEIGHT in step.writes and (self._copied or not isinstance(step, Local)):
            self._copy(self._parameters(), self._parts)
        self._open = self._copied = False

    def release(self) -> None:
        super().release()
        self._staged, self._parts = None, []

    def _parameters(self) -> list[torch.Tensor]:
        # ``data``, and not ``detach()``: graphs that a program still holds go on with the weights as they are then.
        return [tensor.data for tensor in self.tensors]

    def _copy_in(self) -> None:
        if not self._copied:
            self.region(WEIGHT)
            self._copy(self._parts, self._parameters())
            self._copied = True

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for name, tensor, part in zip(self.names, self.tensors, self._parts, strict=True):
            if tensor.shape != part.shape:  # torch would copy one element to many
                refuse_changed(name, tensor, part)
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
