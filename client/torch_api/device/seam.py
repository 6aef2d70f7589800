"""The one door to torch.cuda: streams as integers, moments in a stream, which tensors count as a device's.

Everything behind it works on addresses and stream handles. A test that has no GPU puts an object of its own in the
place of ``SEAM.cuda``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Moment(Protocol):
    """A point in the order of a stream."""

    def passed(self) -> bool:
        """Whether the stream has come to it."""
        ...

    def await_on_host(self) -> None:
        """Returns when it has."""
        ...

    def nanoseconds(self) -> int:
        """When that was, in ns of CLOCK_MONOTONIC. Only once it has passed."""
        ...


class Clock(Protocol):
    """Moments of one device."""

    def now(self) -> Moment:
        """The end of what the current stream holds."""
        ...


class Cuda:
    """torch.cuda, as far as it is used."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the GPU leg carries this tensor."""
        return tensor.is_cuda

    def index(self, device: torch.device) -> int:
        """Number of the device on this host, as torch counts them."""
        return torch.cuda.current_device() if device.index is None else device.index

    def stream(self, index: int) -> int:
        """Handle of the stream in whose order this thread works on a device now."""
        handle: int = torch.cuda.current_stream(index).cuda_stream
        return handle

    def clock(self, index: int) -> Clock:
        """Moments of a device. Waits for the device once."""
        return _EventClock(index)

    @contextmanager
    def by_way_of(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Work of the block is done by ``stream`` (None: by the current one), after what the current stream holds. That
        one goes on after it."""
        if stream is None:
            yield
            return
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


class _EventClock:
    def __init__(self, index: int) -> None:
        self._index = index
        self._anchor = self._record()
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._index))
        return event

    def now(self) -> _EventMoment:
        """See ``Clock``."""
        return _EventMoment(self._record(), self._anchor, self._anchor_ns)


class _EventMoment:
    def __init__(self, event: torch.cuda.Event, anchor: torch.cuda.Event, anchor_ns: int) -> None:
        self._event = event
        self._anchor = anchor
        self._anchor_ns = anchor_ns

    def passed(self) -> bool:
        """See ``Moment``."""
        over: bool = self._event.query()  # type: ignore[no-untyped-call]
        return over

    def await_on_host(self) -> None:
        """See ``Moment``."""
        self._event.synchronize()

    def nanoseconds(self) -> int:
        """See ``Moment``."""
        return self._anchor_ns + int(self._anchor.elapsed_time(self._event) * 1e6)


class _Seam:
    """Where the door is."""

    cuda: Cuda = Cuda()


SEAM = _Seam()
