"""Ends the daemon when it has had no job for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

FIRST_JOB_S = 360.0  # ranks wait five minutes for those of the last host, whose daemon the job needs to be placed


class IdleWatch:
    """Calls ``on_idle`` when the daemon has had nothing to do for ``idle_s`` seconds after a job, or never any for six
    minutes more. Without ``idle_s`` it never does."""

    def __init__(self, idle_s: float | None, on_idle: Callable[[], None]) -> None:
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        if idle_s is not None:
            self._timer = self._loop.call_later(idle_s + FIRST_JOB_S, on_idle)

    def update(self, busy: bool) -> None:
        """Call when it may have changed."""
        if self._idle_s is None or busy is self._busy:
            return
        self._busy = busy
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if busy else self._loop.call_later(self._idle_s, self._on_idle)
