"""Tensors in memory that the daemon sees, and where a tensor lies in it."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch

from bagua.torch_api.join.connection import NOWHERE, HostConnection, Place


class SharedMemory:
    """Makes tensors in shared segments. A segment goes back to the daemon when the last tensor on it is gone."""

    def __init__(self, connection: HostConnection) -> None:
        self._connection = connection
        self._segments: dict[int, tuple[int, int]] = {}  # address -> (bytes, segment id)
        self._lock = threading.Lock()  # guards _segments; not taken by _release
        self._released: deque[int] = deque()  # addresses to forget

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor of ``count`` elements in a segment of its own, filled with zeros."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        segment = self._connection.alloc(count * dtype.itemsize)
        with self._lock:
            self._forget_released()  # the new one may lie where an old one lay
            self._segments[segment.address] = (segment.nbytes, segment.id)
        # torch keeps the segment alive as long as any view exists.
        released = weakref.finalize(segment, self._release, segment.address, segment.id)
        released.atexit = False
        return torch.frombuffer(segment, dtype=dtype, count=count)

    def require(self, total_bytes: int) -> None:
        """Call it before a number of ``empty``, with the bytes that they will take together on this rank.

        Raises ConfigError, before anything is made, if the host can't give them to all of its ranks; the message has
        the job's need here and the memory that is left.
        """
        self._connection.require(total_bytes)

    def place_empty(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
        """``empty``, and where it lies."""
        made = self.empty(count, dtype)
        place = self.locate(made)
        assert place is not None
        return made, place

    def place_stage(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
        """``place_empty``, also for no elements: then there is no place, and (0, 0) stands for it."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu"), NOWHERE
        return self.place_empty(count, dtype)

    def _release(self, address: int, segment_id: int) -> None:
        """Called by the garbage collector, at any moment in any thread: touches nothing that is being iterated over."""
        self._released.append(address)
        self._connection.free(segment_id)

    def _forget_released(self) -> None:
        while self._released:
            del self._segments[self._released.popleft()]

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """(segment id, byte offset) of a contiguous tensor in shared memory; None if it lies elsewhere."""
        if not tensor.is_contiguous():
            return None
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        with self._lock:
            self._forget_released()
            for address, (nbytes, segment_id) in self._segments.items():
                if address <= begin and end <= address + nbytes:
                    return segment_id, begin - address
        return None
