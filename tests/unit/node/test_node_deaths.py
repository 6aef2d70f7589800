"""Deaths by a signal are seen in /proc before the parent hears of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from bagua.daemon.node.processes.proc import read_status

_SAYS_WHEN_IT_IS_THERE = "import sys; print(1, flush=True); sys.exit(int(input()))"


def _death_after(act: Callable[[subprocess.Popen[str]], object], until: int) -> int:
    """As /proc tells it before the process is reaped."""
    command = [sys.executable, "-c", _SAYS_WHEN_IT_IS_THERE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        act(process)
        os.waitid(os.P_PID, process.pid, until | os.WNOWAIT)
        status = read_status(process.pid)
        process.kill()
    assert read_status(process.pid) is None and status is not None
    assert status.doomed == (until == os.WEXITED)
    return status.death


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_death_by_a_signal(number: int) -> None:
    assert _death_after(lambda process: process.send_signal(number), os.WEXITED) == number


@pytest.mark.parametrize("code", [0, 1, 9])
def test_an_exit_code_is_none(code: int) -> None:
    def end(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{code}\n")
        process.stdin.flush()

    assert _death_after(end, os.WEXITED) == 0


def test_a_stop_is_none() -> None:
    assert _death_after(lambda process: process.send_signal(signal.SIGSTOP), os.WSTOPPED) == 0


def test_who_lives_does_not_die() -> None:
    status = read_status(os.getpid())
    assert status is not None and status.death == 0 and not status.doomed
