"""Finds out whether an optimizer treats each element by itself, from a step that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.torch_api.optim.block import Part


class Witness:
    """Copies of some parameters that make the step alone, beside the tensors in which they are rows. If the step treats
    each element by itself, both get the same bits. A norm, a mean or a rule by dimensions makes them differ.

    One row of each part. Everything can be put back as it was before the step, but attributes of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> None:
        """``parameters``: number of the group, the copy, and its state."""
        self.words = ""
        self.parameters: list[tuple[int, torch.Tensor, dict[str, Any]]] = []
        self._optimizer = optimizer
        self._parts = list(parts)
        # An optimizer may change a group in its step, such as a learning rate.
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._before = [
            (part.leaf.detach().clone(), {name: _copy(value) for name, value in part.state.items()}) for part in parts
        ]
        for part in parts:
            row = part.end - part.begin - 1
            own = part.parameters[row]
            assert part.leaf.grad is not None
            copy = _like(own, part.leaf.detach()[row]).requires_grad_()
            copy.grad = _like(own, part.leaf.grad[row])
            state = {
                name: _like(own, value[row]) if _is_row(value, part.leaf) else _copy(value)
                for name, value in part.state.items()
            }
            self.parameters.append((part.block.group, copy, state))

    def agrees(self) -> bool:
        """Compares after the step. True if both agree; else ``words`` says what is wrong."""
        for part, (_, copy, state) in zip(self._parts, self.parameters, strict=True):
            row = part.end - part.begin - 1
            same = state.keys() == part.state.keys() and _same(copy, part.leaf.detach()[row])
            for name, value in part.state.items():
                if same and isinstance(value, torch.Tensor):
                    same = _same(state[name], value[row] if _is_row(value, part.leaf) else value)
            if not same:
                self.words = (
                    f"{type(self._optimizer).__name__} does not treat each element by itself: a parameter "
                    f"{list(copy.shape)} got another result alone than beside others in one tensor"
                )
                return False
        return True

    def restore(self) -> None:
        """Parameters, states and groups are as before the step."""
        for part, (weights, state) in zip(self._parts, self._before, strict=True):
            part.leaf.detach().copy_(weights)
            for name in part.state.keys() - state.keys():
                del part.state[name]
            given = part.block.state(part.begin, part.end)
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    given[name].copy_(value)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})


def _is_row(value: Any, leaf: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape == leaf.shape


def _like(parameter: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """A copy of a row in the shape and strides of its parameter."""
    made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=row.dtype, device=row.device)
    made.as_strided((made.numel(),), (1,)).copy_(row[: made.numel()])
    return made


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(one: torch.Tensor, row: torch.Tensor) -> bool:
    """Bits, where NaN is NaN."""
    flat = one.detach()
    flat = flat.as_strided((flat.numel(),), (1,)) if flat.dim() else flat
    other = row[: flat.numel()] if flat.dim() else row
    return bool(((flat == other) | ((flat != flat) & (other != other))).all())
