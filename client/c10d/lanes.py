"""Lanes: operations that run one after the other in the background, beside those of other lanes."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]
IDLE_S = 10.0  # a thread that had nothing to do for so long ends


class Threads:
    """Runs each job at once, in a thread of its own: an idle one, else a new one.

    Their number has no limit, because jobs may wait for each other. They are daemon threads: an operation that waits
    for a lost rank does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # no thread lives on there

    def _reset(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads that will take a job, minus jobs that were given to them

    def run(self, job: Job) -> None:
        """Returns at once. ``job`` raises nothing."""
        with self._lock:
            new = self._free == 0
            if not new:
                self._free -= 1
        if new:
            threading.Thread(target=self._work, args=(job,), name="bagua-c10d", daemon=True).start()
        else:
            self._jobs.put(job)

    def _work(self, job: Job | None) -> None:
        while job is not None:
            job()
            del job  # its tensors must not live until the next one comes
            with self._lock:
                self._free += 1
            job = self._next()

    def _next(self) -> Job | None:
        try:
            return self._jobs.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if self._free > 0:
                    self._free -= 1
                    return None
            return self._jobs.get()  # one was given to this thread in this moment


class Lane:
    """Jobs that run one after the other, in the order in which they came."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._busy = False

    def _reset_in_fork(self) -> None:
        """Begins anew in a forked child: a thread of the parent may have been at work, and does not live on there."""
        if self._process != os.getpid():
            self._reset()

    def put(self, job: Job) -> None:
        """Runs it in the background, after all before it."""
        self._reset_in_fork()
        with self._lock:
            self._waiting.append(job)
            if self._busy:
                return
            self._busy = True
        self._threads.run(self._drain)

    def run_here(self, job: Job) -> bool:
        """Runs it in this thread, if none waits or runs. False: it did nothing."""
        self._reset_in_fork()
        with self._lock:
            if self._busy:
                return False
            self._busy = True
        job()
        with self._lock:
            self._busy = bool(self._waiting)
            if not self._busy:
                return True
        self._threads.run(self._drain)  # another thread has come meanwhile
        return True

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                job = self._waiting.popleft()
            job()
            del job


THREADS = Threads()  # those of this process
