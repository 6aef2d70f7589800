"""Results of earlier passes in a sum over ranks: they are the same on all ranks, and count once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua.torch_api.step.module_hook import beside_graphs


class EarlierResults:
    """Tells results in ``.grad`` from what this rank has added since. One rank brings them, the others leave them out.

    A mean over ranks needs none of this: the mean of equal values is the value.
    """

    def __init__(self, brings: Callable[[], bool]) -> None:
        """``brings()``: whether this rank, now, is the one that brings them."""
        self._brings = brings
        self._left_out = False
        self._unchanged: set[torch.Tensor] = set()  # parameters to whose result nothing has been added
        self._held: dict[torch.Tensor, torch.Tensor] = {}  # results that have been added to, as they were

    def look(self) -> None:
        """Asks ``brings``: when buckets are new, and in a new generation, where ranks have other numbers."""
        self._left_out = not self._brings()

    def watch(self, parameter: torch.Tensor) -> list[Any]:
        """Installs hooks on the parameter; returns their handles."""

        @beside_graphs
        def before(_: torch.Tensor) -> None:
            """Called before autograd adds to ``.grad``, or returns the gradient instead (``autograd.grad``)."""
            gradient = parameter.grad
            # Zeros count as none: a step begins with ``zero_grad(set_to_none=False)``, too.
            held = gradient is not None and bool(gradient.any())
            if not held:  # the program has begun a new step
                self._held.pop(parameter, None)
                self._unchanged.discard(parameter)
            elif parameter in self._unchanged and gradient is not None:
                self._held[parameter] = gradient.detach().clone()  # autograd adds in place

        register = parameter.register_post_accumulate_grad_hook
        return [parameter.register_hook(before), register(self.note_added)]  # type: ignore[no-untyped-call]

    @beside_graphs  # here, not where it is a method of an object, which torch can't mark
    def note_added(self, parameter: torch.Tensor) -> None:
        """Called when this rank has added to ``.grad``."""
        self._unchanged.discard(parameter)

    def covers(self, parameter: torch.Tensor) -> bool:
        """Returns True if this rank leaves out the whole gradient."""
        return self._left_out and parameter in self._unchanged

    def leave_out(self, parameter: torch.Tensor, contribution: torch.Tensor) -> None:
        """Takes earlier results out of a copy of the gradient, where another rank brings them."""
        held = self._held.get(parameter)
        if held is not None and self._left_out:
            contribution.sub_(held)

    def note(self, parameter: torch.Tensor) -> None:
        """``.grad`` is a result now."""
        self._held.pop(parameter, None)
        self._unchanged.add(parameter)
