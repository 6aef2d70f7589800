"""Ranks that are stopped are out after a while; nobody else is."""

import math
import os
import signal
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from bagua.daemon.node.ranks.stopped_ranks import LateRanks, is_stopped, longest_stop, patience


def test_a_rank_is_late_after_five_seconds():
    late = LateRanks()
    found = [late.look(float(now), [3]) for now in range(7)]
    assert found == [{}, {}, {}, {}, {}, {3: 5.0}, {3: 6.0}]


def test_long_steps_give_more_time():
    late = LateRanks()
    found = [bool(late.look(float(now), [3], longest_stop(1.0))) for now in range(10)]
    assert found.index(True) == 8
    assert [longest_stop(step_s) for step_s in (0.1, 20.0)] == [5.0, 160.0]
    assert longest_stop(0.0) == 30.0, "no step is known yet"


@given(st.floats(0.0, 1e9))
def test_patience_is_eight_steps_rounded_up(step_s):
    """It is told to the coordinator, so it must rarely change."""
    told = patience(step_s)
    if 8 * step_s <= 5.0:
        assert told == 0.0
    else:
        assert told == 7 * 86_400 or (8 * step_s <= told <= 16 * step_s and math.log2(told / 5.0).is_integer())


def test_time_in_which_nobody_looked_does_not_count():
    """The daemon was stopped, too, or the machine slept."""
    late = LateRanks()
    assert not late.look(0.0, [3])
    assert not late.look(1000.0, [3])
    assert not late.look(1003.0, [3])
    assert late.look(1005.0, [3]).keys() == {3}


def test_stopped_is_told_from_waiting():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
