"""Ends a daemon whose starter died, unless it was released before: see ``base/leash.py``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from bagua.base import leash


class LeashWatch:
    """Calls ``on_gone`` if the process at the other end of the socket ``descriptor`` ends before it has said that it
    has joined its job, which a cluster never says. Made with the event loop running."""

    def __init__(self, descriptor: int, on_gone: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        message = leash.receive(self._socket)
        self.close()
        if message != leash.JOINED:
            self._on_gone()

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
