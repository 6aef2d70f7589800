"""Marks of ours on a wrapped model, which no copy of the model has and ``torch.jit`` does not see, and hooks that
torch.compile does not take into its graphs."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo  # private, too: torch.compiler.disable would import dynamo at once

F = TypeVar("F", bound=Callable[..., Any])


def beside_graphs(function: F) -> F:
    """Decorates a function that torch.compile leaves out of its graphs, with all that the function calls."""
    try:  # private, and newer than torch 2.6: costs nothing in a call, where torch.compiler.disable takes 2 µs
        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        eval_frame.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:
        return _disable_dynamo(function)  # type: ignore[return-value]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where a frame above this one is traced
    return function


class Mark:
    """Base of objects that belong to one module. A copy of the module, or a pickled one, is without them. Where the
    module's class has its own way to be copied, they come as None."""

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        return None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(None), ()


class ModuleHook(Mark):
    """Calls ``function`` for ``module`` alone.

    torch.compile leaves it out of its graphs and calls it before or after them: the function computes nothing.
    """

    def __init__(self, module: torch.nn.Module | None, function: Callable[..., None]) -> None:
        _mind_marks()
        self._module = module
        self._function = function

    @beside_graphs
    def __call__(self, module: torch.nn.Module, *rest: Any) -> None:
        if module is self._module:
            self._function(module, *rest)

    def __deepcopy__(self, _: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None, _nothing)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[None, Callable[..., None]]]:
        return ModuleHook, (None, _nothing)


def _nothing(*_: Any) -> None:
    """The function of a hook whose module is another one."""


@functools.cache
def _mind_marks() -> None:
    """Makes copies of modules leave marks out, and ``torch.jit``, which would compile hooks. Once in a process."""
    state_of = torch.nn.Module.__getstate__

    @functools.wraps(state_of)
    def state(self: torch.nn.Module) -> Any:
        return _unmarked(state_of(self))  # type: ignore[no-untyped-call]

    torch.nn.Module.__getstate__ = state  # type: ignore[method-assign]
    stubs_of = getattr(torch.jit._recursive, "get_hook_stubs", None)  # private, and may move: a test tells
    if stubs_of is not None:

        def hook_stubs(module: torch.nn.Module) -> Any:
            bare = object.__new__(type(module))
            bare.__dict__.update(_unmarked(module.__dict__))
            return stubs_of(bare)

        torch.jit._recursive.get_hook_stubs = hook_stubs


def _unmarked(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module without marks, also in its dictionaries of hooks."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, OrderedDict) and any(isinstance(one, Mark) for one in value.values()):
            found[name] = OrderedDict((key, one) for key, one in value.items() if not isinstance(one, Mark))
        elif not isinstance(value, Mark):
            found[name] = value
    return found


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in the output of a forward: also inside tuples, lists, mappings and objects with fields."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for item in output.values():
            yield from tensors_in(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from tensors_in(getattr(output, name))
