"""Matrix products of PowerSGD in C++."""

from __future__ import annotations

from typing import Any

import torch

from bagua import csrc
from bagua.algorithms.low_rank import LowRank, TorchLowRank
from bagua.torch_api.step.transcoding import buffer_of


class NativeLowRank:
    """``bagua.algorithms.LowRank`` for float32 in host memory: as few passes over the matrix as there can be,
    one per method (csrc/core/kernel/low_rank.h counts them)."""

    def __init__(self) -> None:
        self._core: Any = csrc.load()

    def project(
        self,
        memory: torch.Tensor,
        gradient: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        projected: torch.Tensor,
    ) -> None:
        self._core.low_rank_project(
            *_shape(left, right),
            memory=buffer_of(memory),
            gradient=buffer_of(gradient),
            left=buffer_of(left),
            right=buffer_of(right),
            projected=buffer_of(projected),
        )

    def back_project(self, memory: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        self._core.low_rank_back_project(
            *_shape(left, right), memory=buffer_of(memory), left=buffer_of(left), right=buffer_of(right)
        )

    def product(self, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> None:
        self._core.low_rank_product(
            *_shape(left, right), left=buffer_of(left), right=buffer_of(right), result=buffer_of(result)
        )


def _shape(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int, int]:
    """Rows, columns and rank."""
    return left.shape[1], right.shape[1], len(left)


def low_rank_for(tensor: torch.Tensor) -> LowRank:
    """The fastest implementation for matrices like this one."""
    native = tensor.device.type == "cpu" and tensor.dtype is torch.float32
    return NativeLowRank() if native else TorchLowRank()
