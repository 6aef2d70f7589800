"""Encodes and decodes in the rank itself, by kernels of the device; ``train.transcoding`` does it on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CudaTranscoder:
    """A codec at work on vectors of ``count`` float32, in the order of the current stream."""

    def __init__(
        self,
        transcode: Callable[..., None],
        codec: int,
        density: int,
        count: int,
        message_bytes: int,
        device: torch.device,
    ) -> None:
        self._transcode = transcode
        self._codec = codec
        self._density = density
        self._count = count
        self._device = device
        self.message_bytes = message_bytes

    def new_message(self) -> torch.Tensor:
        """Allocates memory for one message."""
        return torch.zeros(self.message_bytes, dtype=torch.uint8, device=self._device)

    def encode(
        self, source: torch.Tensor, message: torch.Tensor, residual: torch.Tensor | None, decoded: torch.Tensor
    ) -> None:
        self._work(
            raw=[source.data_ptr()],
            residual=0 if residual is None else residual.data_ptr(),
            message=message.data_ptr(),
            decoded=[decoded.data_ptr()],
        )

    def decode(self, message: torch.Tensor, decoded: torch.Tensor) -> None:
        self._work(encoded=[message.data_ptr()], decoded=[decoded.data_ptr()])

    def _work(self, **what: Any) -> None:
        self._transcode(self._codec, self._count, density=self._density, **what)
