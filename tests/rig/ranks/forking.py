"""Starts ranks by forking a process that has imported torch already: an import costs some two seconds of a core.

A server, one for each pytest process, imports what ranks need and then forks for every request. It has no threads when
it forks, and it ends with the process that asked for it.
"""

import array
import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from bagua.base.system_limits import await_readable

SERVER = Path(__file__).with_name("fork_server.py")
RANK_MAIN = Path(__file__).with_name("rank_main.py")
READY_S = 300.0
MOST_BYTES = 1 << 20
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Of the server: a fork copies a table of its pages, and half of its time goes when most of them are huge ones."""
SETTLED_AT_START = ("PYTHON", "PYTORCH", "LD_", "MALLOC_", "OMP_", "TORCH", "COVERAGE")
"""Variables that an interpreter or a library reads when it starts: ranks that have their own are not forked."""


def can_fork(environment):
    """Whether a rank with these variables of its own may be forked."""
    return not any(name.startswith(SETTLED_AT_START) for name in environment)


class ForkedProcess:
    """A rank that was forked; what tests use of ``subprocess.Popen``."""

    def __init__(self, server, pid):
        self._server = server
        self.pid = pid

    @property
    def returncode(self):
        """As of the last ``poll`` or ``wait``."""
        return self._server.ended.get(self.pid)

    def poll(self):
        """The exit code, negative for a signal; None while the process runs."""
        self._server.hear(0.0, self.pid)
        return self.returncode

    def wait(self, timeout=None):
        """Waits for the end. Raises subprocess.TimeoutExpired."""
        self._server.hear(timeout, self.pid)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number):
        """Nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """The server's client. Used by one thread."""

    def __init__(self, preload=()):
        """``preload``: modules that it imports beside those of all ranks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **HUGE_PAGES, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(theirs.fileno()), *preload],
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.ended = {}
        self._answer = None
        atexit.register(self.close)

    def fork(self, argv, environment, output):
        """A process that runs rank_main.py with these arguments, its output going to the descriptor ``output``; None
        where what ranks import starts threads, so that no fork is safe."""
        request = json.dumps({"argv": list(argv), "environment": dict(environment), "cwd": os.getcwd()}).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [output]))]
        self._socket.sendmsg([request], rights)
        self._answer = None
        deadline = time.monotonic() + READY_S
        while self._answer is None:
            if not self._receive(deadline - time.monotonic()):
                raise RuntimeError(f"The server that forks ranks gave no answer in {READY_S:.0f} s.")
        return ForkedProcess(self, self._answer) if self._answer else None

    def hear(self, timeout, pid):
        """Waits until the process has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pid not in self.ended:
            if not self._receive(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return

    def _receive(self, timeout):
        if not await_readable([self._socket], timeout):
            return False
        told = json.loads(self._socket.recv(MOST_BYTES) or b"{}")
        if not told:
            raise RuntimeError(f"The server that forks ranks ended with exit code {self._process.wait()}.")
        if "ended" in told:
            self.ended[told["ended"]] = told["code"]
        else:
            self._answer = told["started"]
            self.ended.pop(told["started"], None)  # that of an older process with the same pid
        return True

    def close(self):
        """The server ends when its socket does."""
        self._socket.close()
        self._process.wait()


@functools.cache
def server(*preload):
    """The server of this process that has imported these modules, started at first use."""
    return ForkServer(preload)
