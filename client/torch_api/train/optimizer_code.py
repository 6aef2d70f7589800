"""An optimizer's own step, with other parameters in its groups. Its hooks stay: they see the optimizer as it always is.

The order of hooks needs a private member of torch.optim.Optimizer; a test tells when that moves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def make_hookable(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that has not called ``Optimizer.__init__``, as many wrappers of others do, what registers and
    calls hooks: as torch does it for one that was pickled by a version without them."""
    if isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        torch.optim.Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})


class Exchange:
    """Puts other parameters, and their states, into an optimizer's groups, and back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: list[tuple[dict[str, Any], Any]] = []
        self._states: list[torch.Tensor] = []

    def put(self, lists: Sequence[Sequence[torch.Tensor]], states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """``lists``: for each group its parameters from now on. ``states``: of those that the optimizer lacks."""
        for group, parameters in zip(self._optimizer.param_groups, lists, strict=True):
            self._before.append((group, group["params"]))
            group["params"] = list(parameters)  # a copy: the optimizer's own list stays as it was
        self._states = list(states)
        self._optimizer.state.update(states)

    def take_back(self) -> None:
        """Groups and states are as before ``put``. Nothing if they are already."""
        before, self._before = self._before, []
        for group, parameters in before:
            group["params"] = parameters
        states, self._states = self._states, []
        for parameter in states:
            self._optimizer.state.pop(parameter, None)


def step_with(
    optimizer: torch.optim.Optimizer, enter: Callable[[], None], leave: Callable[[], None], *arguments: Any
) -> Any:
    """``optimizer.step(*arguments)``. Calls ``enter`` right before the optimizer's own code, after all hooks, and
    ``leave`` right behind it, also where it raises. ``leave`` may be called twice, ``enter`` is called once: a subclass
    calls hooks once more with ``super().step()``."""
    entered = False

    def before(*_: Any) -> None:
        nonlocal entered
        if not entered:
            entered = True
            enter()

    def after(*_: Any) -> None:
        leave()

    first = optimizer.register_step_pre_hook(before)
    last = first_behind(optimizer, after)
    try:
        return optimizer.step(*arguments)
    finally:
        first.remove()
        last.remove()
        leave()


def first_behind(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Registers a step post-hook that runs before the others that there are. Returns its handle."""
    handle = optimizer.register_step_post_hook(hook)
    # Torch's handles are of an OrderedDict: order is that of calls.
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def own_code(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step that the optimizer's class defines, without hooks."""
    found: Callable[..., Any] = type(optimizer).step  # torch has wrapped the class's step with its hooks
    return getattr(found, "__wrapped__", found) if getattr(found, "hooked", False) else found


def home_of_step(optimizer: torch.optim.Optimizer) -> str:
    """The name of the module whose code the step is."""
    return str(getattr(inspect.unwrap(type(optimizer).step), "__module__", ""))


def average_losses(
    average: Callable[[float], float], _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step pre-hook of LBFGS: the closure that is passed on returns the loss over all ranks. LBFGS decides by it: with
    different losses ranks would part ways and wait for ever."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first is the optimizer
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
