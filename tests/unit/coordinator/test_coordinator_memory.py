"""State in memory on the event loop: sessions, watchers, logs. Nothing grows without bound."""

import asyncio
from dataclasses import replace

import pytest

from bagua.base.errors import UnavailableError
from bagua.daemon.coordinator.rules.decide import apply, decide
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState, NodeView
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.streams.sessions import MAX_WAITING_DIRECTIVES, NodeSession, Sessions
from bagua.daemon.coordinator.streams.watchers import Watchers
from bagua.proto import common_pb2, node_pb2


def placed():
    spec = checked_spec(common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1))
    job = JobRecord("job-1", spec, 1.0)
    view = NodeView("a", "h", "::1", "boot", 1, 0, True, 1.0)
    return apply(job, decide(job, {"a": view}, 1.0, Options()), 1.0, 1e9)[0]


async def test_a_wish_is_told_once_per_session():
    sessions = Sessions(lambda: None)
    session = NodeSession("a", "boot", "h")
    sessions.add(session)
    job = placed()
    for _ in range(3):
        sessions.send(job.job_id, job.hosts, sessions.order(job))
    assert session.outgoing.qsize() == 1
    run = node_pb2.Directive.FromString(session.outgoing.get_nowait()).run
    assert (run.job_id, run.host_index, run.spec.entry) == ("job-1", 0, "t.py")
    stopping = replace(job, state=JobState.STOPPING, reason="why", outcome=JobState.FAILED)
    sessions.send(stopping.job_id, stopping.hosts, sessions.order(stopping))
    sessions.send(stopping.job_id, stopping.hosts, sessions.order(stopping))
    assert node_pb2.Directive.FromString(session.outgoing.get_nowait()).stop.reason == "why"
    newer = NodeSession("a", "boot", "h")
    sessions.add(newer)
    assert session.closed.is_set() and not sessions.remove(session)
    sessions.send(stopping.job_id, stopping.hosts, sessions.order(stopping))
    assert newer.outgoing.qsize() == 1 and sessions.get("a") is newer
    assert sessions.remove(newer) and len(sessions) == 0


async def test_a_daemon_that_takes_nothing_loses_its_session():
    session = NodeSession("a", "boot", "h")
    for _ in range(MAX_WAITING_DIRECTIVES):
        session.send(node_pb2.Directive())
    assert not session.closed.is_set()
    session.send(node_pb2.Directive())
    assert session.closed.is_set() and "does not read its stream" in session.close_reason


async def test_silent_sessions_are_closed_after_a_lease():
    sessions = Sessions(lambda: None)
    silent, heard = NodeSession("a", "boot", "h"), NodeSession("b", "boot", "h")
    for session in (silent, heard):
        session.note_heard(5.0)
        sessions.add(session)
    heard.note_heard(6.0)
    sessions.close_silent(15.0, 10.0)
    assert silent.close_reason == "nothing was heard of this daemon for 10 s"
    assert not heard.closed.is_set()


async def test_a_watcher_keeps_the_last_progress_of_each_rank():
    watchers = Watchers()
    with watchers.watch("job-1") as watcher:
        for step in range(100_000):
            watchers.report(common_pb2.Progress(job_id="job-1", rank=step % 4, step=step))
        watchers.notify("job-1")
        changed, progress = await asyncio.wait_for(watcher.wait(), 1)
        assert changed and [report.step for report in progress] == [99_996, 99_997, 99_998, 99_999]
        watchers.report(common_pb2.Progress(job_id="job-1", rank=9))
        assert await asyncio.wait_for(watcher.wait(), 1) == (False, [common_pb2.Progress(job_id="job-1", rank=9)])
        for rank in range(5_000):
            watchers.report(common_pb2.Progress(job_id="job-1", rank=rank))
        assert len((await watcher.wait())[1]) == 1_024
    with watchers.watch("job-1") as early:
        watchers.close()
        with watchers.watch("job-1") as late:
            for watcher in (early, late):
                with pytest.raises(UnavailableError, match="is stopping"):
                    await asyncio.wait_for(watcher.wait(), 1)
    watchers.notify("job-1")  # nobody is there any more
    for number in range(5_000):
        watchers.report(common_pb2.Progress(job_id=f"job-{number}"))
    assert watchers.progress("job-4999") is not None and watchers.progress("job-1") is None


async def test_a_reply_of_another_nodes_session_is_dropped():
    sessions = Sessions(lambda: None)
    mine, other = NodeSession("a", "boot", "h"), NodeSession("b", "boot", "h")
    sessions.add(mine)
    sessions.add(other)
    got = []
    number, chunk = sessions.open_request(mine, got.append), common_pb2.LogChunk(data=b"x")
    sessions.route(other, number, chunk)
    assert got == []
    sessions.route(mine, number, chunk)
    sessions.remove(mine)
    assert got == [chunk, None] and sessions.close_request(number) is None
