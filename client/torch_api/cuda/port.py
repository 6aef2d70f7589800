"""Port to torch.cuda: all calls of it are here. Streams as integers, moments in a stream, which tensors are a device's.

Everything behind it works on addresses and stream handles. A test that has no GPU puts an object of its own in the
place of ``PORT.cuda``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Moment(Protocol):
    """A point in the order of a stream."""

    def passed(self) -> bool:
        """Returns True if the stream has come to this moment."""
        ...

    def await_on_host(self) -> None:
        """Blocks until the stream has come to this moment."""
        ...

    def nanoseconds(self) -> int:
        """Returns when that was, in ns of CLOCK_MONOTONIC. Only for a moment that has passed."""
        ...


class Clock(Protocol):
    """Clock that measures moments of one device."""

    def now(self) -> Moment:
        """The end of the work that the current stream holds."""
        ...


class Cuda:
    """torch.cuda, as far as it is used."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns True if the GPU leg carries this tensor."""
        return tensor.is_cuda

    def index(self, device: torch.device) -> int:
        """Number of the device on this host, as torch counts them."""
        return torch.cuda.current_device() if device.index is None else device.index

    def name(self) -> str:
        """Name of the current device; empty where this process uses none."""
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name() if used else ""

    def stream(self, index: int) -> int:
        """Handle of the stream in whose order this thread works on a device now."""
        return _raw_stream(index)

    def clock(self, index: int) -> Clock:
        """Moments of a device. Waits for the device once."""
        return _EventClock(index)

    @contextmanager
    def by_way_of(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Work of the block is done by ``stream`` (None: by the current one), after the current one's work. That
        one goes on after it."""
        if stream is None:
            yield
            return
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


def _public_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle


# Private to torch. The public way makes a Stream, which took 16 us in a step on an H100's host, twice for each bucket.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


# How far from its anchor a moment may be: torch says the distance as a float32 of milliseconds, which after hours is no
# more exact than a millisecond.
RENEW_MS = 60_000.0


class _EventClock:
    def __init__(self, index: int) -> None:
        self._index = index
        event = self._record()
        event.synchronize()  # the host learns the time of this moment when it has passed
        self.anchor = event, time.monotonic_ns()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._index))
        return event

    def now(self) -> _EventMoment:
        return _EventMoment(self._record(), self)


class _EventMoment:
    def __init__(self, event: torch.cuda.Event, clock: _EventClock) -> None:
        self._event = event
        self._clock = clock
        self._anchor = clock.anchor

    def passed(self) -> bool:
        over: bool = self._event.query()  # type: ignore[no-untyped-call]
        return over

    def await_on_host(self) -> None:
        self._event.synchronize()

    def nanoseconds(self) -> int:
        """Returns the time. A moment far from the anchor becomes the anchor of later ones."""
        anchor, anchor_ns = self._anchor
        distance_ms = anchor.elapsed_time(self._event)
        found = anchor_ns + int(distance_ms * 1e6)
        if distance_ms > RENEW_MS and self._clock.anchor is self._anchor:
            self._clock.anchor = self._event, found
        return found


class _Port:
    """Holder of the port that is in use."""

    cuda: Cuda = Cuda()


PORT = _Port()
