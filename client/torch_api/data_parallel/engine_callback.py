"""The two private doors of torch.autograd that we use, in one place. A test tells when either moves."""

from __future__ import annotations

from collections.abc import Callable

import torch


def queue_callback(function: Callable[[], None]) -> None:
    """Calls ``function`` when the backward pass that runs now is at its end. Only inside a pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def current_pass() -> int:
    """Number of the backward pass that runs in this thread; -1 outside."""
    return torch._C._current_graph_task_id()
