"""Deaths by a signal are seen in /proc before the parent hears of them."""

import os
import signal
import subprocess

import pytest

from bagua.daemon.node.processes.proc import read_status


@pytest.mark.parametrize(
    ("act", "death"),
    [
        *((f"kill -{number} $$", number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)),
        *((f"exit {code}", 0) for code in (0, 1, 9)),
        ("kill -STOP $$", 0),
    ],
)
def test_a_death_by_a_signal(act, death):
    stops = "STOP" in act
    with subprocess.Popen(["sh", "-c", act]) as process:
        os.waitid(os.P_PID, process.pid, (os.WSTOPPED if stops else os.WEXITED) | os.WNOWAIT)
        status = read_status(process.pid)
        process.kill()
    assert read_status(process.pid) is None and status is not None
    assert (status.doomed, status.death) == (not stops, death)
