"""Runs database work in threads, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_READERS = 2


class Worker:
    """Threads for the database: one that writes, and some that read. A reader does not wait for the disk of a
    writer.
    """

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database-writer")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="database-reader")

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``function``, run in the writer's thread; it ends also if the caller is cancelled."""
        return await self._call(self._writer, lambda: function(*args, **kwargs))

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same in a reader's thread."""
        return await self._call(self._readers, lambda: function(*args, **kwargs))

    async def _call(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    def close(self) -> None:
        self._readers.shutdown()
        self._writer.shutdown()
