"""Shared memory for tensors that come and go in every step: it is used again, because making a segment costs more than
filling it."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from bagua.torch_api.job.connection import NOWHERE, HostConnection, Place
from bagua.torch_api.job.session import Session
from bagua.torch_api.job.shared_memory import take_fitting, tensor_on

if TYPE_CHECKING:
    from bagua.csrc import core


class Stages:
    """Stages of one session. Memory of a tensor comes back when the last view of it is gone. Thread-safe.

    As much as was in use at once stays here; the rest goes back to the daemon. ``freed``: how many segments went back.
    ``for_peers``: other ranks of this host may borrow it.
    """

    def __init__(self, session: Session, for_peers: bool = False) -> None:
        self._connection: HostConnection = session.connection
        self._for_peers = for_peers
        self._lock = threading.Lock()  # guards what follows but _returned
        self._free: list[core.Segment] = []  # the one that came back last is the last one
        self._returned: deque[core.Segment] = deque()
        self.freed = 0
        self._held = self._most = 0  # bytes: in use now, and at most so far

    def place(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
        """A one-dimensional tensor of ``count`` elements of any content, and where it lies. No elements: nowhere."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu"), NOWHERE
        with self._lock:
            self._take_back()
            segment = self._find(count * dtype.itemsize)
            self._held += segment.nbytes
            self._most = max(self._most, self._held)
        return tensor_on(segment, count, dtype, self._returned.append), (segment.id, 0)

    def _find(self, nbytes: int) -> core.Segment:
        size = rounded(nbytes)
        return take_fitting(self._free, nbytes, 2 * size) or self._connection.alloc(size, self._for_peers)

    def _take_back(self) -> None:
        while self._returned:
            segment = self._returned.popleft()
            self._held -= segment.nbytes
            self._free.append(segment)
        while sum(one.nbytes for one in self._free) + self._held > self._most:
            self._connection.free(self._free.pop(0).id)  # the one that was used least recently
            self.freed += 1


def rounded(nbytes: int) -> int:
    """Returns at most a quarter more, so that sizes that differ a little from step to step take the same memory."""
    unit = 1 << max(12, nbytes.bit_length() - 3)
    return -(-nbytes // unit) * unit
