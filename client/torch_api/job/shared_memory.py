"""Tensors in memory that the daemon sees, and where a tensor lies in it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from bagua.torch_api.job.connection import HostConnection, Place

if TYPE_CHECKING:
    from bagua.csrc import core


def tensor_on(
    segment: core.Segment, count: int, dtype: torch.dtype, gone: Callable[[core.Segment], object]
) -> torch.Tensor:
    """A one-dimensional tensor of ``count`` elements at the begin of the segment. ``gone(segment)`` is called when the
    last tensor on it is gone: by the garbage collector, at any moment, in any thread."""
    view = memoryview(segment)  # torch keeps it alive as long as any tensor exists
    weakref.finalize(view, gone, segment).atexit = False  # at the interpreter's end the daemon takes all back
    return torch.frombuffer(view, dtype=dtype, count=count)


def take_fitting(spare: list[core.Segment], nbytes: int, most: int) -> core.Segment | None:
    """Takes the smallest segment of ``nbytes`` to ``most`` bytes out of the list; None if there is none."""
    fitting = [one for one in list(spare) if nbytes <= one.nbytes <= most]
    if not fitting:
        return None
    found = min(fitting, key=lambda one: one.nbytes)
    spare.remove(found)
    return found


class SharedMemory:
    """Makes tensors in shared segments. A segment goes back to the daemon when the last tensor on it is gone."""

    def __init__(self, connection: HostConnection) -> None:
        self._connection = connection
        self._segments: dict[int, tuple[int, int]] = {}  # address -> (bytes, segment id)
        self._lock = threading.Lock()  # guards _segments; not taken by _release
        self._released: deque[int] = deque()  # addresses to forget
        self._spare: list[core.Segment] | None = None  # in the block of ``reusing``

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor of ``count`` elements in a segment of its own, filled with zeros."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")  # a segment of no bytes can't be made
        nbytes = count * dtype.itemsize
        segment = self._take_spare(nbytes) if self._spare else None
        if segment is None:
            segment = self._connection.alloc(nbytes)
        else:
            ctypes.memset(segment.address, 0, nbytes)  # one that serves again has the old content
        with self._lock:
            self._forget_released()  # the new one may lie where an old one lay: its entry must be gone by then
            self._segments[segment.address] = (segment.nbytes, segment.id)
        return tensor_on(segment, count, dtype, self._release)

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Marks a block in which segments that tensors leave serve those that are made next. The daemon would have to
        empty each page and to fill it with zeros, which takes a second for each GB."""
        self._spare = []
        try:
            yield
        finally:
            spare, self._spare = self._spare, None
            self._give_all_back(spare)

    def _take_spare(self, nbytes: int) -> core.Segment | None:
        """A spare segment that is not much too large. Where there is none, as much goes back as is to be made: this
        rank never needs more than before and after the block."""
        assert self._spare is not None
        found = take_fitting(self._spare, nbytes, 2 * nbytes)
        if found is not None:
            return found
        while self._spare and nbytes > 0:
            segment = self._spare.pop()
            nbytes -= segment.nbytes
            self._give_back(segment)
        return None

    def require(self, total_bytes: int) -> None:
        """Call it before a number of ``empty``, with the bytes that they will take together on this rank.

        Raises ConfigError, before anything is made, if the host can't give them to all of its ranks; the message has
        the job's need here and the memory that is left.
        """
        spare = sum(segment.nbytes for segment in list(self._spare or ()))
        self._connection.require(max(0, total_bytes - spare))

    def place_empty(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
        """``empty``, and where it lies."""
        made = self.empty(count, dtype)
        place = self.locate(made)
        assert place is not None
        return made, place

    def _release(self, segment: core.Segment) -> None:
        """Called by the garbage collector, at any moment in any thread: touches nothing that is being iterated over."""
        self._released.append(segment.address)  # appended: a deque needs no lock
        spare = self._spare  # read once: the block of ``reusing`` may end meanwhile
        if spare is None:
            self._give_back(segment)
        else:
            spare.append(segment)
            if self._spare is not spare:
                self._give_all_back(spare)

    def _give_all_back(self, spare: list[core.Segment]) -> None:
        with suppress(IndexError):  # two threads may empty it
            while True:
                self._give_back(spare.pop())

    def _give_back(self, segment: core.Segment) -> None:
        self._connection.free(segment.id)

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
