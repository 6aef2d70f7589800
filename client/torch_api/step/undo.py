"""Takes back what a plan has changed in place, so that it may run again up to its last step that communicates."""

from __future__ import annotations

import torch

from bagua.algorithms.plan import WEIGHT, Local, Plan
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.step.dataflow import changed_in_place


class Undo:
    """Contents that a plan changes before its last step that communicates: saved when it starts, restored before it
    starts again."""

    def __init__(self, bucket: PlanBucket, plan: Plan) -> None:
        self._bucket = bucket
        self._slots = changed_in_place(plan)
        # Tensors outside of slots, of an optimizer for example.
        self._beside = [step.beside for step in plan.steps if isinstance(step, Local) and step.beside is not None]
        self._copies: list[torch.Tensor] = []
        self.needed = bool(self._slots or self._beside)
        self.saved = False
        """Set it to False when the changes count."""

    def _tensors(self) -> list[torch.Tensor]:
        found = [tensor for tensors in self._beside for tensor in tensors()]
        for name in self._slots:
            found += self._bucket.views(WEIGHT) if name == WEIGHT else [self._bucket.slot(name)]
        return found

    def save(self) -> None:
        """Saves the contents, unless that has been done and the changes do not count yet."""
        if self.saved:
            return
        tensors = self._tensors()
        if not self._copies:  # made once: the shapes stay
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        with torch.no_grad():
            torch._foreach_copy_(self._copies, tensors)
        self.saved = True

    def restore(self) -> None:
        """Contents are as when they were saved, if they were."""
        if self.saved:
            with torch.no_grad():
                torch._foreach_copy_(self._tensors(), self._copies)
