"""Calls that run: those whose credential is good no more are ended, however long they would have lasted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bagua.base.errors import UnauthenticatedError
from bagua.daemon.coordinator.rules.identity import ADMINISTRATOR, Identity


class Calls:
    """Use from the event loop."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], Identity] = {}
        self._ended: set[asyncio.Task[Any]] = set()

    @contextmanager
    def running(self, caller: Identity) -> Iterator[None]:
        """Notes that the present task answers a call of ``caller``. Raises UnauthenticatedError in it if that is not
        let in any more.
        """
        task = asyncio.current_task()
        if caller is ADMINISTRATOR or task is None:  # that token is good for as long as the coordinator lives
            yield
            return
        self._running[task] = caller
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()  # the task goes on, to answer with the error
            raise UnauthenticatedError("The credential of this call has expired, or was revoked. [BG804]") from None
        finally:
            del self._running[task]
            self._ended.discard(task)

    def end_those_not(self, good: Callable[[Identity], bool]) -> None:
        """Ends the calls whose caller is not ``good``."""
        for task, caller in self._running.items():
            if not good(caller) and task not in self._ended:
                self._ended.add(task)
                task.cancel()
