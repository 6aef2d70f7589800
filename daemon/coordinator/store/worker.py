"""Runs database work in threads, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bagua.daemon.coordinator.store.store import Store, Transaction

T = TypeVar("T")
_READERS = 2


class Worker:
    """Threads for the database: one that writes, and some that read. A reader does not wait for the disk of a
    writer.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database-writer")  # one: SQLite has one write lock
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="database-reader")

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """The result of ``Store.apply``, in the writer's thread; it ends also if the caller is cancelled."""
        return await self.write_with(lambda store: store.apply(work))

    async def write_with(self, function: Callable[[Store], T]) -> T:
        """The result of ``function``, which makes transactions of its own, in the writer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, function, self.store)

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """The result of ``Store.look``, in a reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.store.look, work)

    def close(self) -> None:
        self._readers.shutdown()
        self._writer.shutdown()
