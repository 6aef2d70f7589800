"""Arithmetic on a matrix and the product of two thin ones, for low-rank compression.

Thin matrices are stored transposed, [rank, rows] and [rank, columns]: products with few long rows are the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

_CACHED_ELEMENTS = 1 << 17  # fit into a processor's cache together with what is computed from them


class LowRank(Protocol):
    """Products of a gradient's matrix with thin ones. All tensors are dense. ``memory``: [rows, columns], float32 or
    float64. ``gradient`` and ``result``: the same shape, in the model's dtype. ``left``: P transposed, [rank, rows].
    ``right``: Q transposed, [rank, columns].
    """

    def project(
        self,
        memory: torch.Tensor,
        gradient: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        projected: torch.Tensor,
    ) -> None:
        """``memory += gradient - P Qᵀ``, and of what it is then ``projected = (memory Q)ᵀ``, [rank, rows]."""

    def back_project(self, memory: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Computes ``right = (memoryᵀ P)ᵀ``."""

    def product(self, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> None:
        """Computes ``result = P Qᵀ``."""


class TorchLowRank:
    """``LowRank`` by torch, on any device and in any dtype. On a processor the matrix goes through its cache block by
    block."""

    def project(
        self,
        memory: torch.Tensor,
        gradient: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        projected: torch.Tensor,
    ) -> None:
        for rows in _blocks(memory):
            block = memory[rows]
            for number in range(len(left)):
                # One row of P and Q at a time: a product with few long rows is the fastest.
                block.addr_(left[number, rows], right[number], alpha=-1)
            block.add_(gradient[rows])
            _multiply(right, block.t(), projected[:, rows])

    def back_project(self, memory: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        _multiply(left, memory, right)

    def product(self, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> None:
        if not left.dtype == right.dtype == result.dtype:
            result.copy_(left.to(right.dtype).t() @ right)
            return
        torch.mul(left[0].unsqueeze(1), right[0], out=result)
        for number in range(1, len(left)):
            result.addr_(left[number], right[number])


def _blocks(matrix: torch.Tensor) -> Iterator[slice]:
    """Runs of rows; all at once on a device, where each call costs."""
    rows, columns = matrix.shape
    step = max(1, _CACHED_ELEMENTS // columns) if matrix.device.type == "cpu" else rows
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a @ b``, rounded to the dtype of ``out`` at the end."""
    # ``mm`` writes into contiguous memory of its own dtype alone.
    if a.dtype == b.dtype == out.dtype and out.is_contiguous():
        torch.mm(a, b, out=out)
    else:
        common = torch.promote_types(a.dtype, b.dtype)
        out.copy_(a.to(common) @ b.to(common))
