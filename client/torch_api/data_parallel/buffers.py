"""Buffers of a module (statistics of BatchNorm) that follow rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua.torch_api.communication import broadcast
from bagua.torch_api.communicator import Communicator
from bagua.torch_api.session import Session

ALIGNMENT = 16


class BufferBroadcast:
    """Sends rank 0's buffers to all in one operation, packed in memory that the daemon sees."""

    def __init__(self, session: Session, find: Callable[[], Sequence[torch.Tensor]]) -> None:
        """``find`` returns the buffers that there are now: the same shapes and dtypes on all ranks."""
        self._session = session
        self._find = find
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._stage = torch.empty(0, dtype=torch.uint8)
        self._parts: list[torch.Tensor] = []

    def run(self, communicator: Communicator) -> None:
        """Everybody's buffers become rank 0's."""
        buffers = [buffer for buffer in self._find() if buffer.numel()]
        if not buffers or communicator.nranks() == 1:
            return
        kinds = [(buffer.dtype, buffer.shape) for buffer in buffers]
        if kinds != self._kinds:
            self._make(buffers)
            self._kinds = kinds
        with torch.no_grad():
            if communicator.rank() == 0:
                torch._foreach_copy_(self._parts, buffers)
            broadcast(self._stage, 0, communicator)
            if communicator.rank() != 0:
                torch._foreach_copy_(buffers, self._parts)

    def _make(self, buffers: Sequence[torch.Tensor]) -> None:
        begins, end = [], 0
        for buffer in buffers:
            begins.append(end)
            end += -(-buffer.numel() * buffer.element_size() // ALIGNMENT) * ALIGNMENT
        self._stage = self._session.memory.empty(end, torch.uint8)
        self._parts = [
            self._stage[begin : begin + buffer.numel() * buffer.element_size()].view(buffer.dtype).view(buffer.shape)
            for begin, buffer in zip(begins, buffers, strict=True)
        ]
