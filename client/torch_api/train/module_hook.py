"""Hooks on modules that do not follow a copy of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

try:
    from torch._compile import _disable_dynamo as beside_graphs  # torch.compiler.disable would import dynamo at once
except ImportError:  # private, and may move
    from torch.compiler import disable as beside_graphs  # type: ignore[no-redef]


class NoHook:
    """Takes the place of the hook in a copied or pickled module."""

    def __call__(self, *_: Any) -> None:
        """Does nothing."""


class ModuleHook:
    """Calls ``function`` for ``module`` alone. A deep copy of the module, or one that was pickled, gets ``NoHook``.

    torch.compile leaves it out of its graphs and calls it before or after them: the function computes nothing.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., None]) -> None:
        self._module = module
        self._function = function

    @beside_graphs
    def __call__(self, module: torch.nn.Module, *rest: Any) -> None:
        if module is self._module:
            self._function(module, *rest)

    def __deepcopy__(self, _: dict[int, Any]) -> NoHook:
        return NoHook()

    def __reduce__(self) -> tuple[type[NoHook], tuple[()]]:
        return NoHook, ()


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
