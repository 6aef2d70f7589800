"""A service that a rank starts for its own job (ephemeral cluster, enrolment), and the messages between them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

from bagua.base import parent_socket
from bagua.base.errors import ServiceError
from bagua.base.system_limits import await_readable

TAIL_BYTES = 4000


class LeashedService:
    """A child, ``python -m ARGUMENTS --leash DESCRIPTOR``, in a POSIX session of its own. It ends with its socket: when
    this process does, or calls ``close``."""

    _started: ClassVar[list[subprocess.Popen[bytes]]] = []  # kept, so that they are reaped and not warned about

    def __init__(self, title: str, arguments: Sequence[str]) -> None:
        self.title = title
        self._output = tempfile.TemporaryFile()
        self._socket, theirs = parent_socket.pair()
        with theirs:
            # -P: a folder named like one of our packages in the working directory must not shadow it.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments, "--leash", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in os.environ.items() if name not in parent_socket.FOREIGN_SETTINGS},
                start_new_session=True,  # Ctrl-C in the terminal reaches the rank, which ends it
            )
        self._started[:] = [process for process in self._started if process.poll() is None]
        self._started.append(self._process)

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """Its next message. Raises ServiceError if the message tells of an error, and, with the last words of the
        service, if it has ended or none comes in time."""
        pidfd = os.pidfd_open(self._process.pid)
        try:
            readable = await_readable([self._socket.fileno(), pidfd], deadline_s)
        finally:
            os.close(pidfd)
        if not readable:
            raise ServiceError(f"{self.title} did not answer within {deadline_s:.0f} s.{self._last_words()} [BG910]")
        message = parent_socket.receive(self._socket)
        if message is None:
            raise ServiceError(f"{self.title} ended while it started.{self._last_words()} [BG910]")
        if "error" in message:
            raise ServiceError(str(message["error"]))
        return message

    def send(self, **message: Any) -> None:
        """Raises ServiceError if it has ended."""
        try:
            parent_socket.send(self._socket, message)
        except OSError:
            self.check()  # if the service has ended, its last words say more
            raise ServiceError(f"{self.title} does not listen any more.{self._last_words()} [BG910]") from None

    def check(self) -> None:
        """Raises ServiceError, with its last words, if it has ended."""
        if self._process.poll() is not None:
            raise ServiceError(f"{self.title} has ended.{self._last_words()} [BG910]")

    def keep(self) -> socket.socket:
        """The socket, which is the caller's from here on."""
        return socket.socket(fileno=self._socket.detach())

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._output.close()

    def _last_words(self) -> str:
        self._output.seek(0)
        text = self._output.read()[-TAIL_BYTES:].decode(errors="replace").strip()
        return f" It wrote:\n{text}" if text else ""
