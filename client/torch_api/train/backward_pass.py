"""Detects the end of a backward pass. It needs a private function of torch.autograd; a test tells when that moves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch


class BackwardPass:
    """A backward pass that runs now; ``at_end`` is called when it is over, unless it ends by an exception.

    autograd holds the callback as long as the pass lives, and nobody else does: that is how ``alive`` knows.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """Only inside a pass."""
        callback = functools.partial(at_end)  # another one for each pass, and no frame that torch.compile would take
        self.alive: Callable[[], object | None] = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
