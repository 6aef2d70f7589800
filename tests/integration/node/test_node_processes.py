"""Finding and ending processes of earlier lives; the watch over idleness."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from bagua.daemon.node.jobs.journal import JobEntry, end_leftovers
from bagua.daemon.node.processes.proc import members, read_status, start_time
from bagua.proto import common_pb2, node_pb2


def entry(pid=0, ticks=0, adopt=False, rank_socket="/s", error=""):
    """A job of an earlier life; with ``pid`` and its start time, one whose rank ran."""
    ranks = [common_pb2.RankStatus(pid=pid, state=common_pb2.RANK_STATE_RUNNING)] if pid else []
    return JobEntry(node_pb2.LocalJob(job_id="j", ranks=ranks, error=error), adopt, rank_socket, {pid: ticks})


@pytest.fixture
def stranger():
    """A process with a session of its own, as a rank has."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True, env={"BAGUA_JOB_ID": "other"}) as process:
        yield process
        process.kill()


async def test_leftovers_are_known_by_pid_and_start_time(stranger):
    pid, ticks = stranger.pid, start_time(stranger.pid)
    taken = entry(pid, ticks - 1)
    await end_leftovers(taken, "restarted")
    assert stranger.poll() is None, "the number belongs to somebody else now"
    assert taken.ended and taken.job.withdrawn and taken.job.error == "restarted" and taken.job.ranks[0].signal == 9
    await end_leftovers(entry(pid, ticks, adopt=True), "restarted")
    assert stranger.poll() is None, "started by others"
    left = entry(pid, ticks, error="first")
    await end_leftovers(left, "restarted")
    assert stranger.wait(5) == -9 and left.job.error == "first"


async def test_leftovers_are_known_by_their_environment():
    marks = {"BAGUA_JOB_ID": "j", "BAGUA_DAEMON_SOCKET": "/s/of/this/test"}
    with subprocess.Popen(["sleep", "60"], start_new_session=True, env=marks) as process:
        for _ in range(500):  # right after exec there is none: looks again, for five seconds at most
            if Path(f"/proc/{process.pid}/environ").read_bytes():
                break
            time.sleep(0.01)
        await end_leftovers(entry(rank_socket="/another"), "restarted")
        assert process.poll() is None
        await end_leftovers(entry(rank_socket="/s/of/this/test"), "restarted")
        assert process.wait(5) == -9


def test_what_proc_says(stranger):
    status = read_status(stranger.pid)
    assert (status.parent, status.session) == (os.getpid(), stranger.pid) and status.start_time > 0
    assert [found.pid for found in members({stranger.pid: status.start_time}, [])] == [stranger.pid]
    assert members({stranger.pid: status.start_time + 1}, []) == [], "the number belongs to somebody else now"
    assert os.getpid() not in [found.pid for found in members({os.getsid(0): start_time(os.getsid(0))}, [])]
    assert read_status(2**22 + 1) is None and start_time(2**22 + 1) == 0
