"""Starts a service in a session of its own and waits until it says that it is ready."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from bagua.base.errors import ServiceError

TAIL_BYTES = 4000
# Settings of services that run elsewhere must not reach those that we start.
FOREIGN_SETTINGS = (
    "BAGUA_COORDINATOR",
    "BAGUA_DATABASE_URL",
    "BAGUA_STATE_DIR",
    "BAGUA_TOKEN",
    "BAGUA_TOKEN_FILE",
    "BAGUA_TLS",
)
_IN_MOVED_TO = 0x80
_IN_CLOEXEC = 0x80000  # see inotify(7)


class ServiceProcess:
    """A service that outlives nobody's interest in it but ours: it ends by itself when its job does."""

    _started: ClassVar[list[subprocess.Popen[bytes]]] = []  # kept, so that they are reaped and not warned about

    def __init__(self, title: str, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        self.title = title
        self._output = tempfile.TemporaryFile()
        # -P: a folder named like one of our packages in the working directory must not shadow it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=pass_fds,
            env={name: value for name, value in os.environ.items() if name not in FOREIGN_SETTINGS},
            start_new_session=True,
        )
        self._started[:] = [process for process in self._started if process.poll() is None]
        self._started.append(self._process)

    def wait_readable(self, descriptor: int, deadline_s: float) -> None:
        """Returns when ``descriptor`` can be read. Raises ServiceError with the last words of the service when it
        ends or the deadline passes before; the service is then stopped."""
        pidfd = os.pidfd_open(self._process.pid)
        try:
            readable, _, _ = select.select([descriptor, pidfd], [], [], deadline_s)
        finally:
            os.close(pidfd)
        if descriptor in readable:
            return
        if not readable:
            self._process.terminate()
            raise ServiceError(f"{self.title} was not ready after {deadline_s:.0f} s.{self._last_words()}")
        raise ServiceError(f"{self.title} ended while it started.{self._last_words()}")

    def _last_words(self) -> str:
        self._output.seek(0)
        text = self._output.read()[-TAIL_BYTES:].decode(errors="replace").strip()
        return f" It wrote:\n{text}" if text else ""

    def close(self) -> None:
        """Stops listening to its output."""
        self._output.close()


def start_until_file(title: str, arguments: Callable[[Path], Sequence[str]], deadline_s: float) -> str:
    """Starts ``python -m arguments(file)`` and returns the content of that file, once the service has moved it into
    place.

    Raises ServiceError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory(prefix="bagua-") as folder:
        watch = libc.inotify_init1(_IN_CLOEXEC)
        if watch < 0 or libc.inotify_add_watch(watch, os.fsencode(folder), _IN_MOVED_TO) < 0:
            raise ServiceError(f"{folder} can't be watched: {os.strerror(ctypes.get_errno())}.")
        file = Path(folder) / "ready.json"
        service = ServiceProcess(title, arguments(file))
        try:
            service.wait_readable(watch, deadline_s)
            return file.read_text()
        finally:
            os.close(watch)
            service.close()


def start_until_line(
    title: str, arguments: Callable[[int], Sequence[str]], pass_fds: Sequence[int], deadline_s: float
) -> str:
    """Starts ``python -m arguments(descriptor)`` and returns the line that the service writes to that descriptor.

    Raises ServiceError.
    """
    ready, write_end = os.pipe()
    try:
        service = ServiceProcess(title, arguments(write_end), [write_end, *pass_fds])
    finally:
        os.close(write_end)
    deadline = time.monotonic() + deadline_s
    line = b""
    try:
        while not line.endswith(b"\n"):
            service.wait_readable(ready, max(0.0, deadline - time.monotonic()))
            received = os.read(ready, 65536)
            if not received:
                raise ServiceError(f"{title} ended while it started.")
            line += received
    finally:
        os.close(ready)
        service.close()
    return line.decode()
