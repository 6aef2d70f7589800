"""Averages the loss over ranks for LBFGS. It decides by the loss: with different losses ranks would part ways and wait
for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Average = Callable[[float], float]


def average_losses(
    average: Average, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step pre-hook: the closure that is passed on returns the loss over all ranks."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def averaged() -> Any:
        loss = closure()
        if isinstance(loss, torch.Tensor):
            return torch.full_like(loss.detach(), average(loss.item()))
        return average(float(loss))

    if "closure" in kwargs:
        return args, {**kwargs, "closure": averaged}
    return (args[0], averaged, *args[2:]), kwargs
