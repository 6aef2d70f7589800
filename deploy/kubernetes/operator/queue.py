"""Names of jobs to serve, each at most once at a time; what changes while a job is served is served afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Key = tuple[str, str]  # Namespace and name of a BaguaJob
Serve = Callable[[Key], Awaitable[float | None]]
LEAST_S = 0.05  # between two looks at a job: changes that come together are seen together


class Queue:
    """Lives on one event loop. ``serve`` returns after how many seconds it wants the job again."""

    def __init__(self, serve: Serve, at_once: int = 8) -> None:
        self._serve = serve
        self._limit = asyncio.Semaphore(at_once)
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def wake(self, key: Key) -> None:
        """Something about this job has changed."""
        if self._closed:
            return
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._busy:
            self._again.add(key)
            return
        self._busy.add(key)
        task = asyncio.get_running_loop().create_task(self._run(key))
        self._tasks.add(task)  # the event loop itself refers to tasks weakly
        task.add_done_callback(self._tasks.discard)

    def waiting(self) -> list[Key]:
        """Jobs that are served again after a while."""
        return list(self._timers)

    async def close(self) -> None:
        """Begins nothing more, and returns when what runs has ended: a thread can't be cancelled."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, key: Key) -> None:
        again: float | None = None
        try:
            async with self._limit:
                again = await self._serve(key)
        finally:
            self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            again = 0.0
        if again is not None and not self._closed:
            self._timers[key] = asyncio.get_running_loop().call_later(max(again, LEAST_S), self._due, key)

    def _due(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.wake(key)
