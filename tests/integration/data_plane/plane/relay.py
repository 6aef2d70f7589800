"""A relay before a TCP port: a network that can stall, corrupt and cut what goes through it."""

from __future__ import annotations

import contextlib
import socket
import threading

PIECE = 256 << 10


class Relay:
    """Forwards every connection to ``address``. One thread for each direction of each; all end with ``close``."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.lock = threading.Lock()  # guards the next two
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.flips = 0
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def stall(self) -> None:
        """Nothing goes through until ``go_on``: the receiver does not read, the sender's buffers fill up."""
        self.open_gate.clear()

    def go_on(self) -> None:
        self.open_gate.set()

    def corrupt(self) -> None:
        """One bit of the next large piece arrives changed."""
        with self.lock:
            self.flips += 1

    def cut(self, connection: int) -> None:
        """Ends one of the connections, as a network does that loses its state."""
        with self.lock:
            for end in self.pairs[connection]:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self.listener.accept()
                outer = socket.create_connection(self.target)
                with self.lock:
                    self.pairs.append((inner, outer))
                for ends in ((inner, outer), (outer, inner)):
                    self.threads.append(threading.Thread(target=self._forward, args=ends))
                    self.threads[-1].start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := bytearray(source.recv(PIECE)):
                self.open_gate.wait()
                with self.lock:
                    if self.flips and len(piece) >= 4096:
                        self.flips -= 1
                        piece[len(piece) // 2] ^= 4
                target.sendall(piece)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.go_on()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        with self.lock:
            for pair in self.pairs:
                for end in pair:
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads[1:]:
            thread.join()
        for end in (self.listener, *(end for pair in self.pairs for end in pair)):
            end.close()
