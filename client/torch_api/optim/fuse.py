"""``fuse_optimizer``, in the names of the original."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from bagua.torch_api.optim.fusion import Fusion


def fuse_optimizer(
    optimizer: torch.optim.Optimizer, do_flatten: bool = True, check_flatten: bool = True
) -> torch.optim.Optimizer:
    """Gives an optimizer ``fuse_step``, which steps many small parameters in one kernel call. Returns the optimizer.

    ``optimizer.fuse_step(closure=None)`` does what ``optimizer.step(closure)`` does, with the same bits, hooks and
    schedulers; both may be called in turn. Parameters of equal size (those of less than 32 bytes: of any) lie in one
    tensor, and so do their gradients and states. ``optimizer.state``, ``state_dict`` and ``load_state_dict`` are those
    of the plain optimizer, before and after ``with_bagua``. Gradients that lie at equal distances in one memory, in
    the order of parameters, are used there.

    It fuses parameters that take steps element by element: with torch's Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD,
    NAdam, RAdam, RMSprop, Rprop and SGD. An optimizer of your own is tried: in its fused steps 1, 2, 3, 5, 9 and so on
    some parameters make the step alone, too, and if a bit differs all go back to plain steps. Set its class's attribute
    ``elementwise`` to True to leave that out, or to False to refuse. What can't be fused steps plainly.

    Args:
        optimizer: Any torch.optim.Optimizer.
        do_flatten: Parameters move into the shared tensors (False: they keep their memory, at the price of two copies).
            Those that share memory with others are never moved.
        check_flatten: Each step checks that parameters and states are still where they were, and follows if not
            (after ``load_state_dict``, ``model.to``, new groups). False saves that time; then they must not change.

    Attributes that it adds: ``_bagua_fused_count`` (as in the original: grows by one for each group of which a
    ``fuse_step`` has fused parameters), ``_bagua_not_fused`` (number of parameters that the last one did not fuse, by
    reason), ``_bagua_fused_optimizer`` (the fused tensors; ``count``: parameters that the last one fused; ``explain()``
    says it in words). The logger "bagua" tells changes at INFO.

    Raises TypeError for another object, RuntimeError if the optimizer has been fused already.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"fuse_optimizer got a {type(optimizer).__name__}: pass a torch.optim.Optimizer. [BG609]")
    if is_fused_optimizer(optimizer):
        raise RuntimeError(f"This {type(optimizer).__name__} has been fused already: call fuse_optimizer once. [BG609]")
    optimizer._bagua_fused_optimizer = Fusion(optimizer, do_flatten, check_flatten)  # type: ignore[attr-defined]
    optimizer._bagua_fused_count = 0  # type: ignore[attr-defined]
    optimizer._bagua_not_fused = {}  # type: ignore[attr-defined]
    optimizer.fuse_step = types.MethodType(fuse_step, optimizer)  # type: ignore[attr-defined]
    return optimizer


def fuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Makes one step of an optimizer that ``fuse_optimizer`` has prepared. Returns the loss, if ``closure`` computes
    it.

    Raises RuntimeError for another optimizer.
    """
    if not is_fused_optimizer(optimizer):
        raise RuntimeError(
            f"This {type(optimizer).__name__} is not fused: call bagua.contrib.fuse_optimizer first. [BG609]"
        )
    fusion: Fusion = optimizer._bagua_fused_optimizer  # type: ignore[attr-defined]
    found = fusion.step(closure)
    optimizer._bagua_fused_count = fusion.steps_of_groups  # type: ignore[attr-defined]
    optimizer._bagua_not_fused = dict(fusion.reasons)  # type: ignore[attr-defined]
    return found


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True if ``fuse_optimizer`` has prepared the optimizer."""
    return hasattr(optimizer, "_bagua_fused_optimizer")
