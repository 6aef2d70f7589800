"""A coordinator or node daemon as a child of this process: its start, its last words, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bagua.base.errors import ServiceError
from bagua.base.memory_kills import MemoryWatch
from bagua.base.parent_process import environment_with_parent
from bagua.base.system_limits import await_readable


class ServiceProcess:
    """A coordinator or node daemon started by us. Its standard output and error go to ``log``.

    ``prefix``: a command that becomes the service, by exec, after it has changed something (``ip netns exec NAME``).
    ``passed``: descriptors that it gets.
    """

    def __init__(
        self,
        label: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        prefix: Sequence[str] = (),
        passed: Sequence[int] = (),
    ) -> None:
        self.label = label
        self.log = log
        self._ready, write_end = os.pipe()
        # -P: a folder named like one of our packages must not shadow it.
        program = [*prefix, sys.executable, "-P", "-m", module]
        command = [*program, *arguments, "--ready-fd", str(write_end), "--death-signal"]
        try:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[write_end, *passed],
                    start_new_session=True,  # a session of its own: signals go to it and to what it started
                    env=environment_with_parent(),
                )
        finally:
            os.close(write_end)  # the pipe ends with the service
        self._pidfd = os.pidfd_open(self.process.pid)
        self._memory = MemoryWatch(self.process.pid)

    def wait_ready(self, deadline: float) -> dict[str, str]:
        """The ready line of the service. Raises ServiceError, with its own words, if it can't start by ``deadline``."""
        data = b""
        try:
            while not data.endswith(b"\n"):
                if not await_readable([self._ready], deadline - time.monotonic()):
                    raise ServiceError(
                        f"The {self.label} was not ready in time: is this machine overloaded?{last_words(self.log)} "
                        "[BG910]"
                    )
                received = os.read(self._ready, 65536)
                if not received:
                    break
                data += received
        finally:
            os.close(self._ready)
        if not data.endswith(b"\n"):
            raise ServiceError(f"The {self.label} ended while it started.{last_words(self.log)} [BG910]")
        line: dict[str, str] = json.loads(data)
        if "error" in line:
            raise ServiceError(f"The {self.label} can't start: {line['error']}")
        return line

    def describe_end(self) -> str:
        """Waits for the end of the process and says how it ended."""
        await_readable([self._pidfd])
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        why = f" {self._memory.explain()}" if code == -signal.SIGKILL else ""
        return f"The {self.label} {how}.{why}{last_words(self.log)}"

    def signal_group(self, number: int) -> None:
        """Signals the process and what it started in its session, if it has not been reaped yet."""
        if self.process.poll() is None:  # once it is reaped the id may be another process's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def wait(self, deadline: float) -> None:
        """Waits for the end of the process; kills it at ``deadline`` (of time.monotonic())."""
        if not await_readable([self._pidfd], deadline - time.monotonic()):
            self.signal_group(signal.SIGKILL)
        self.process.wait()


def last_words(log: Path) -> str:
    """The last line of a service's log, as a sentence; empty if there is none."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:  # whoever started it has stopped it, and has removed the folder meanwhile
        return ""
    return f" Its last words: {lines[-1].strip()}" if lines else ""
