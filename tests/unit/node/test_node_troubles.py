"""Troubles of a node that must not end, or stop for ever, what runs there."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import structlog
from rig.limits import SOON_S

from bagua.base.retention import Keep
from bagua.daemon.node.host import daemon as daemons
from bagua.daemon.node.jobs import job as jobs_of_node
from bagua.daemon.node.jobs.engine_host import in_thread
from bagua.daemon.node.jobs.job import Job
from bagua.daemon.node.jobs.jobs import Jobs
from bagua.daemon.node.keeper.keeper import Keeper
from bagua.daemon.node.processes.groups import JobGroups
from bagua.daemon.node.processes.proc import read_status
from bagua.daemon.node.processes.process import kill_members
from bagua.daemon.node.rules.state import RankPhase, new_job
from bagua.daemon.node.session.session import Session
from bagua.proto import node_pb2


class ReadOnlyJournal:
    def remove(self, job_id):
        raise OSError(30, "Read-only file system", f"{job_id}.json")


async def test_jobs_that_can_not_be_forgotten_keep_no_daemon_away(tmp_path):
    node = SimpleNamespace(
        jobs_folder=tmp_path,
        logs_folder=tmp_path,
        keep=Keep(jobs=1),
        journal=ReadOnlyJournal(),
        log=structlog.get_logger(),
    )
    jobs = Jobs(node, lambda job_id: None)
    for name in ("old", "new"):
        jobs._remember(node_pb2.LocalJob(job_id=name))
    with structlog.testing.capture_logs() as told:
        await jobs._trim()
    assert [line["job"] for line in told] == ["old"]


async def test_a_part_of_the_daemon_that_ends_ends_it():
    """Without its fence a node would let a job run twice."""

    async def fails():
        raise RuntimeError("a fault of the fence")

    node = SimpleNamespace(_stop=asyncio.Event(), _welcome=lambda ready: asyncio.sleep(0))
    session = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(RuntimeError, match="fence"):
        async with asyncio.timeout(SOON_S):
            works = [asyncio.ensure_future(fails()), session]
            await daemons.NodeDaemon._until_stopped(node, works, lambda about: None)
    session.cancel()


def test_a_control_group_that_can_not_be_read_has_no_processes(tmp_path):
    """A program that runs as root can turn its group into one of threads, whose list of processes is an error."""
    groups = JobGroups(tmp_path, tmp_path)
    (tmp_path / f"{groups._prefix}job" / "cgroup.procs").mkdir(parents=True)
    assert groups.jobs() == ["job"] and groups.processes("job") == []


STOPS_ITSELF = """
import os, signal, sys
def stop(*about):
    signal.signal(signal.SIGCONT, lambda *about: os._exit(0))
    os.kill(os.getpid(), signal.SIGSTOP)
signal.signal(signal.SIGCONT, stop)
print(flush=True)
while True:
    signal.pause()
"""


async def test_a_rank_that_was_about_to_stop_itself_goes_on(monkeypatch):
    """Its own thread has read that the lease was over before the daemon held it, and stops it when it is continued."""
    monkeypatch.setattr(jobs_of_node, "CONTINUE_AGAIN_S", 0.5, raising=False)
    process = subprocess.Popen([sys.executable, "-c", STOPS_ITSELF], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        job = Job.__new__(Job)
        job.spec = SimpleNamespace(adopt=False)
        job.engine = SimpleNamespace(set_fence=lambda at: None)
        state = new_job("n", (0,), adopt=False, grace_s=1.0)
        job.state = state.update(0, phase=RankPhase.RUNNING, pid=process.pid)
        job._loop, job.held, job._fence_at = asyncio.get_running_loop(), False, float("inf")
        job.set_fence(1.0, held=True)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        job.set_fence(float("inf"), held=False)
        async with asyncio.timeout(SOON_S):
            assert await asyncio.to_thread(process.wait) == 0
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_renewal_whose_children_live_on_is_not_waited_for():
    """What builds the core may outlive the process that was asked for its versions."""
    keeper = Keeper(lambda descriptor, first: ([], []), restart=True)
    keeper._renewal = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $! >&2; kill -9 $$"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert keeper._renewal.stderr is not None
    child, late = int(keeper._renewal.stderr.readline()), []
    keeper._renewal.stderr.close()

    def end(*about):
        late.append(child)
        os.kill(child, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(5)
    try:
        keeper._renewed(os.waitstatus_to_exitcode(os.waitpid(keeper._renewal.pid, 0)[1]))
        assert not late
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        os.kill(child, signal.SIGKILL)


def no_thread(*about):
    raise RuntimeError("can't start new thread")


async def test_processes_are_killed_where_no_thread_can_be_started(monkeypatch):
    """They may be the reason for that."""
    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    process = subprocess.Popen(["sleep", "1000"])
    left = [status for status in [read_status(process.pid)] if status is not None]
    asyncio.get_running_loop().call_later(0.1, process.poll)
    found = iter([left, []])
    assert await kill_members({}, (), SOON_S, os.getpid(), lambda: next(found)) == []
    assert process.wait() == -signal.SIGKILL


async def test_a_record_waits_until_a_thread_can_be_started(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(OSError, match="No further process or thread"):
            await in_thread(lambda: None)
    await in_thread(lambda: None)


async def test_a_session_waits_until_a_thread_can_be_started(monkeypatch):
    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    session = SimpleNamespace(_endpoint=SimpleNamespace(token_file=None))
    assert await Session._one_stream(session) == ("can't start new thread", False)
