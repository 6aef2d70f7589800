"""Merges the updates of a job and the output of its ranks into one stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")
# Items that were read and not yet taken: a job that prints faster than the caller reads must not fill the memory.
WAITING = 64
_LOOK_S = 0.2
_END = object()


class Merged(Generic[T]):
    """An iterator over what several streams give, in the order in which it comes. It ends when all have
    ended, or when ``first`` has and the others give nothing for ``patience_s``. An error of ``first`` is raised; one of
    the others ends that stream alone. After ``close`` each thread that reads stops at its next item."""

    def __init__(self, first: Callable[[], Iterator[T]], *others: Callable[[], Iterator[T]], patience_s: float) -> None:
        self._queue: Queue[tuple[int, object]] = Queue(WAITING)
        self._closed = Event()
        self._patience_s = patience_s
        self._left = {0, *range(1, len(others) + 1)}
        for number, start in enumerate((first, *others)):
            Thread(target=self._read, args=(number, start), daemon=True, name=f"watch {number}").start()

    def _read(self, number: int, start: Callable[[], Iterator[T]]) -> None:
        end: object = _END
        try:
            for one in start():
                if not self._put(number, one):
                    return
        except Exception as error:
            end = _Failed(error)
        self._put(number, end)

    def _put(self, number: int, item: object) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put((number, item), timeout=_LOOK_S)  # no endless wait: nobody may take it any more
                return True
            except Full:  # the caller takes its time
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        try:
            while self._left:
                try:
                    number, item = self._queue.get(timeout=None if 0 in self._left else self._patience_s)
                except Empty:
                    return
                if item is _END or isinstance(item, _Failed):
                    self._left.discard(number)
                    if isinstance(item, _Failed) and number == 0:
                        raise item.error
                    continue
                yield item  # type: ignore[misc]
        finally:
            self.close()

    def close(self) -> None:
        """Ends the reading."""
        self._closed.set()


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error
