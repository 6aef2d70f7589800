"""Deaths by a signal are seen in /proc before the parent hears of them."""

import os
import signal
import subprocess
import sys

import pytest

from bagua.daemon.node.processes.proc import read_status

_SAYS_WHEN_IT_IS_THERE = "import sys; print(1, flush=True); sys.exit(int(input()))"


def _death_after(act, until):
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
def test_a_death_by_a_signal(number):
    assert _death_after(lambda process: process.send_signal(number), os.WEXITED) == number


@pytest.mark.parametrize("code", [0, 1, 9])
def test_an_exit_code_is_none(code):
    def end(process):
        process.stdin.write(f"{code}\n")
        process.stdin.flush()

    assert _death_after(end, os.WEXITED) == 0


def test_a_stop_is_none():
    assert _death_after(lambda process: process.send_signal(signal.SIGSTOP), os.WSTOPPED) == 0
