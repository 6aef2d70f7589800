"""asyncio's event loop, without two stalls that would hold up users' calls while many nodes speak.

**The bell of grpc.aio.** A thread of grpc.aio tells the loop of each event by a byte on a socket pair. In a turn the
loop takes all events, but one byte. So bytes pile up while many events come; at some 280 the socket is full, the thread
sleeps until three quarters of them are read, and no call gets on for 200 turns. Here the bytes go with their events.

**Full passes of the garbage collector.** They look at every rank of every job: 0.1 s for 8,000 ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

_BELL_BYTES = 65_536
# Objects that stayed until the youngest are looked at; passes of each generation until one of the next. So a full pass
# comes after five million objects that stayed.
_PASSES = (2_000, 5, 500)


class EventLoop(asyncio.SelectorEventLoop):
    """Event loop for ``asyncio.Runner``."""

    def add_reader(  # type: ignore[override]  # its generics say no more
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Adds a reader as asyncio does, but grpc.aio finds one byte on its bell."""
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            callback = partial(_with_one_byte, fd, callback)
        super().add_reader(fd, callback, *args)


def collect_seldom() -> None:
    """Makes full passes of the garbage collector rare, in a process that has started: what is there stays for ever.
    Records of jobs refer to each other in one direction, so they go without the collector.
    """
    gc.collect()  # what is garbage now must not be frozen
    gc.freeze()  # no pass looks at these objects again
    gc.set_threshold(*_PASSES)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    bound = callback.func if isinstance(callback, partial) else callback
    return type(getattr(bound, "__self__", None)).__name__ == "PollerCompletionQueue"


def _with_one_byte(bell: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Calls ``callback`` with one byte on the bell. An event is in grpc.aio's queue before its byte is written, and
    ``callback`` takes the whole queue after a byte: so whoever takes the other bytes first misses none.
    """
    with contextlib.suppress(BlockingIOError):
        # A look: one byte must stay for grpc.aio.
        waiting = len(bell.recv(_BELL_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        if waiting > 1:
            bell.recv(waiting - 1, socket.MSG_DONTWAIT)
    callback(*args)
