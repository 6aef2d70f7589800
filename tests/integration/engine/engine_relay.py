"""A relay before a TCP port: a network that is slow, stalls, or resets what goes through it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any


class Relay:
    """Passes on the connections of one listener, in the order in which they come, each at a rate of its own."""

    def __init__(self, target: str, address: str = "127.0.0.1") -> None:
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.rate = 0.0  # bytes per second of each connection; 0: unlimited
        self.going = threading.Event()  # cleared: nothing is passed on any more, nothing is closed
        self.going.set()
        self.over = False
        self.taken = 0  # bytes
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.listener = socket.create_server((address, 0))
        self.address = f"{address}:{self.listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        self.threads.append(threading.Thread(target=target, args=arguments))
        self.threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                self.sockets += [near, far]
                self._start(self._pass, near, far)
                self._start(self._pass, far, near)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        free_at = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.taken += len(data)
                if self.rate:
                    free_at = max(free_at, time.monotonic() - 0.05) + len(data) / self.rate
                    time.sleep(max(0.0, free_at - time.monotonic()))
                while not self.going.wait(0.05):
                    if self.over:
                        return
                target.sendall(self.change(data))
            target.shutdown(socket.SHUT_WR)

    def change(self, data: bytes) -> bytes:
        """Returns the bytes of a piece to pass on. An attacker's relay overrides this."""
        return data

    def reset(self) -> None:
        """Ends every connection with an RST at both ends."""
        for item in self.sockets:
            with contextlib.suppress(OSError):
                item.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                item.shutdown(socket.SHUT_RD)  # wakes the thread that reads
                item.close()

    def close(self) -> None:
        self.over = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for item in self.sockets:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for item in self.sockets:
            item.close()
