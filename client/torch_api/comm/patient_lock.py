"""A lock of the threads of a rank. A thread that waits long for it says for which other thread."""

from __future__ import annotations

import threading

from bagua.torch_api.job.connection import HostConnection


class PatientLock:
    """Held by a thread while generations change, or where they must not. A thread may take it again.

    Waiting has no limit of its own: it ends when the holder's does. That one waits for the next generation of a job,
    which may be paused, or for other ranks, and the daemon says for which.
    """

    def __init__(self, connection: HostConnection) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self._holder = 0  # its number: names are asked for where somebody waits, not once in a step
        self.give_back = self._lock.release
        """Once for each time that it was taken."""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def take_if_free(self) -> bool:
        """Takes it without waiting. False: another thread holds it."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._holder = threading.get_ident()
        return free

    def _wait(self) -> None:
        waited = more = self._connection.first_warning_s
        while not self._lock.acquire(timeout=more):
            mine = threading.current_thread().name
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            holder = names.get(self._holder, str(self._holder))
            words = f"Thread {mine} waits for thread {holder}, which enters the next generation or ends a step."
            more = self._connection.go_on(waited, more=words, ends=False)
            waited += more
