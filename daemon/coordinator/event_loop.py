"""asyncio's event loop, without three stalls that would hold up users' calls while many nodes speak.

**The bell of grpc.aio.** A thread of grpc.aio tells the loop of each event by a byte on a socket pair. In a turn the
loop takes all events, but one byte. So bytes pile up while many events come; at some 280 the socket is full, the thread
sleeps until three quarters of them are read, and no call gets on for 200 turns. Here the bytes go with their events.

**The queue of callbacks.** asyncio runs callbacks in the order in which they became ready, and looks for new events
only after all of them. When a thousand nodes speak at once, 1,700 callbacks are ready, and each of the six steps of a
user's call waits for all of them. Here callbacks of tasks that are *prompt* run in the next turn, and others wait in a
queue of which each turn runs at most ``IN_TURN``. gRPC's server is prompt, and so are calls with one answer
(``interceptors.py``); streams of nodes and logs, the reconciler and everything else are not.

**Full passes of the garbage collector.** They look at every rank of every job: 0.1 s for 8,000 ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

IN_TURN = 20
_BELL_BYTES = 65_536
# Objects that stayed until the youngest are looked at; passes of each generation until one of the next. So a full pass
# comes after five million objects that stayed.
_PASSES = (2_000, 5, 500)

T = TypeVar("T")
_PROMPT: ContextVar[bool] = ContextVar("prompt", default=False)


def prompt_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Runs ``work`` in a task whose steps, and those of the tasks that it starts, wait for no queue."""
    context = copy_context()
    context.run(_PROMPT.set, True)
    return asyncio.create_task(work, context=context)


def wait_in_turn() -> None:
    """From now on the present task, and the tasks that it starts, wait for their turn."""
    _PROMPT.set(False)


def is_prompt() -> bool:
    """True in a prompt task."""
    return _PROMPT.get()


class EventLoop(asyncio.SelectorEventLoop):
    """For ``asyncio.Runner``."""

    _ready: deque[asyncio.Handle]  # of asyncio: callbacks of the next turn

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[asyncio.Handle] = deque()

    def call_soon(  # type: ignore[override]  # its generics say no more
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's; a callback whose context is not prompt waits for its turn."""
        handle = super().call_soon(callback, *args, context=context)
        if not (is_prompt() if context is None else context.get(_PROMPT, False)):
            self._waiting.append(self._ready.pop())
        return handle

    def _run_once(self) -> None:
        """A turn: events of sockets and threads, timers, prompt callbacks, and some of those that wait."""
        for _ in range(min(IN_TURN, len(self._waiting))):
            self._ready.append(self._waiting.popleft())
        super()._run_once()  # type: ignore[misc]  # not in the stubs

    def add_reader(  # type: ignore[override]  # its generics say no more
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        """As asyncio's, but grpc.aio finds one byte on its bell."""
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            callback = partial(_with_one_byte, fd, callback)
        super().add_reader(fd, callback, *args)


def collect_seldom() -> None:
    """For a process that has started: what is there stays for ever, and full passes come seldom. Records of jobs refer
    to each other in one direction, so they go without the collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_PASSES)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    bound = callback.func if isinstance(callback, partial) else callback
    return type(getattr(bound, "__self__", None)).__name__ == "PollerCompletionQueue"


def _with_one_byte(bell: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """An event is in grpc.aio's queue before its byte is written, and ``callback`` takes the whole queue after a byte:
    so whoever takes the other bytes first misses none."""
    with contextlib.suppress(BlockingIOError):
        waiting = len(bell.recv(_BELL_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        if waiting > 1:
            bell.recv(waiting - 1, socket.MSG_DONTWAIT)
    callback(*args)
