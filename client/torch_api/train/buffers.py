"""Buffers of a module (statistics of BatchNorm) that follow rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.state_copy import elements_of
from bagua.torch_api.job.session import Session
from bagua.torch_api.train.agreement import ALIGNMENT, by_device, stage_beside


class BufferBroadcast:
    """Sends one rank's buffers to all in one operation per device, packed in memory that can be communicated."""

    def __init__(self, session: Session, find: Callable[[], Sequence[torch.Tensor]]) -> None:
        """``find`` returns the buffers that there are now: the same shapes and dtypes on all ranks."""
        self._session = session
        self._find = find
        self._kinds: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        self._packs: list[_Pack] = []

    def run(self, communicator: Communicator, root: int = 0) -> None:
        """Everybody's buffers become those of the rank at position ``root``."""
        # ``data``, so that the graph of a forward pass is still valid after the next one, as with DDP.
        buffers = [elements_of(buffer.data) for buffer in self._find() if buffer.numel()]
        if not buffers or communicator.nranks() == 1:
            return
        kinds = [(buffer.dtype, buffer.shape, buffer.device) for buffer in buffers]
        alike = by_device(buffers)
        if kinds != self._kinds:
            self._packs = [_Pack(self._session, some) for some in alike]
            self._kinds = kinds
        for pack, some in zip(self._packs, alike, strict=True):
            pack.exchange(some, communicator, root)


class _Pack:
    """Buffers of one device, side by side in one tensor."""

    def __init__(self, session: Session, buffers: Sequence[torch.Tensor]) -> None:
        self._elastic = session.elastic
        begins, end = [], 0
        for buffer in buffers:
            begins.append(end)
            end += -(-buffer.numel() * buffer.element_size() // ALIGNMENT) * ALIGNMENT  # views of any dtype begin there
        self._stage = stage_beside(buffers[0], end, session)
        self._parts = [
            self._stage[begin : begin + buffer.numel() * buffer.element_size()].view(buffer.dtype).view(buffer.shape)
            for begin, buffer in zip(begins, buffers, strict=True)
        ]

    def exchange(self, buffers: list[torch.Tensor], communicator: Communicator, root: int) -> None:
        """Makes the buffers those of ``root``."""
        # One by one: torch copies no lists that hold lazily negated tensors.
        with torch.no_grad():
            # Where the root is lost, another rank is the root of the repeat.
            if communicator.rank() == root or self._elastic:
                for part, buffer in zip(self._parts, buffers, strict=True):
                    part.copy_(buffer)
            communicator.broadcast(self._stage, root)
            if communicator.rank() != root:
                for part, buffer in zip(self._parts, buffers, strict=True):
                    buffer.copy_(part)
