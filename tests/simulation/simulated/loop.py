"""An event loop whose clock jumps to the next thing to do: hours pass in milliseconds, and always the same way."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import Any


class VirtualLoop(asyncio.BaseEventLoop):
    """Nothing here waits for anything but other parts of the simulation.

    The order of callbacks is that of asyncio's own loop. This loop leaves out what a simulation has no use for: files,
    signals, other threads and debug mode. 100,000 histories are some 20 million callbacks."""

    _ready: Any
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float
    _stopping: bool

    def __init__(self):
        super().__init__()
        self._seconds = 1_000.0
        self.unfinished = set()  # asyncio.all_tasks() looks at the tasks of all loops
        self.set_task_factory(self._make_task)

    def time(self):
        return self._seconds

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when, callback, *args, context=None):
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _make_task(self, loop, work, **more):
        task = asyncio.Task(work, loop=loop, **more)
        self.unfinished.add(task)
        task.add_done_callback(self.unfinished.discard)
        return task

    def _run_once(self):
        """Runs what is ready. If nothing is, time passes; raises RuntimeError when everybody waits for ever."""
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)
        if not ready and not self._stopping:
            if not scheduled:
                raise RuntimeError("everything waits, and nothing will ever happen")
            self._seconds = max(self._seconds, scheduled[0].when())
        until = self._seconds + self._clock_resolution
        while scheduled and scheduled[0]._when < until:
            ready.append(heappop(scheduled))
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _process_events(self, event_list):
        """There are no files."""

    def _write_to_self(self):
        """There are no threads."""
