"""Ends a daemon with the process that started it: see ``base/parent_socket.py``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from bagua.base import parent_socket


class LeashWatch:
    """Calls ``on_gone`` when the process at the other end of the socket ``descriptor`` ends. Made with the event loop
    running."""

    def __init__(self, descriptor: int, on_gone: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        if parent_socket.receive(self._socket) is None:
            self.close()
            self._on_gone()

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
