"""An event loop whose clock jumps to the next thing to do: hours pass in milliseconds, and always the same way."""

from __future__ import annotations

import asyncio
from typing import Any


class VirtualLoop(asyncio.BaseEventLoop):
    """Nothing here waits for anything but other parts of the simulation."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self  # what BaseEventLoop asks for events
        self._seconds = 1_000.0

    def time(self) -> float:
        """Seconds of the simulation."""
        return self._seconds

    def select(self, timeout: float | None) -> tuple[()]:
        """Nothing is ready: time passes. Raises RuntimeError when everybody waits for ever."""
        if timeout is None:
            raise RuntimeError("everything waits, and nothing will ever happen")
        self._seconds += timeout
        return ()

    def _process_events(self, event_list: Any) -> None:
        """There are no files."""

    def _write_to_self(self) -> None:
        """There are no threads."""
