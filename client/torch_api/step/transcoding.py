"""Encoding in the rank itself, by the core's kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from bagua import csrc
from bagua.algorithms import Codec


def buffer_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor as the core takes it. The tensor must outlive it."""
    # No copy is made: the core reads the tensor's own memory.
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


class Transcoder:
    """One codec at work on vectors of ``count`` float32."""

    def __init__(self, codec: Codec, count: int) -> None:
        core = csrc.load()
        self._transcode = core.transcode
        self._codec = core.CODECS[codec.name]
        self._density = codec.density_units
        self._count = count
        self.message_bytes = core.encoded_bytes(self._codec, count, self._density)

    def new_message(self) -> torch.Tensor:
        """Memory for one message. torch aligns what it allocates as messages need it (64 bytes)."""
        return torch.zeros(self.message_bytes, dtype=torch.uint8, device="cpu")

    def encode(
        self,
        source: torch.Tensor,
        message: torch.Tensor,
        residual: torch.Tensor | None = None,
        decoded: torch.Tensor | None = None,
    ) -> None:
        """``message`` = encode(source + residual), ``decoded`` = decode(message), ``residual`` = the loss.

        ``decoded`` may be ``source``.
        """
        self._transcode(
            self._codec,
            self._count,
            raw=[buffer_of(source)],
            residual=None if residual is None else buffer_of(residual),
            message=buffer_of(message),
            decoded=[] if decoded is None else [buffer_of(decoded)],
            density=self._density,
        )

    def decode(self, message: torch.Tensor, decoded: torch.Tensor) -> None:
        """``decoded`` = decode(message)."""
        self._transcode(
            self._codec, self._count, encoded=[buffer_of(message)], decoded=[buffer_of(decoded)], density=self._density
        )

    def add(self, messages: Sequence[torch.Tensor], result: torch.Tensor, scale: float = 1.0) -> None:
        """``result`` = (result + the sum of decode(message)) * scale, in the order of ``messages``."""
        self._transcode(
            self._codec,
            self._count,
            raw=[buffer_of(result)],
            encoded=[buffer_of(message) for message in messages],
            scale=scale,
            decoded=[buffer_of(result)],
            density=self._density,
        )
