"""The coordinator dies and comes back; jobs go on."""

import asyncio
import signal
import threading
import time

import grpc
import grpc.aio
import pytest

from bagua.base.errors import UnavailableError
from bagua.base.security import call_metadata
from bagua.daemon.coordinator.admin.settings import Settings
from bagua.daemon.node.session.session import Endpoint
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n
from bagua.proto.node_pb2_grpc import NodeServiceStub

from .conftest import DONE, RUNNING, held


def submit(client, nnodes=1, **more):
    given = {"placement_timeout_s": 30.0, "stop_grace_s": 1.0, **more}
    return client.submit(c.JobSpec(entry="t.py", nnodes=nnodes, nproc_per_node=1, **given))


def test_a_running_job_does_not_notice_a_killed_coordinator(start, connect, until):
    first = start()
    a, b = connect(first, "a"), connect(first, "b")
    with first.client() as client:
        job = submit(client, 2)
        run = a.expect(n.RunJob)
        for peer, rank in ((a, 0), (b, 1)):
            peer.report(run, n.LOCAL_PHASE_STARTED, {rank: RUNNING}, engine_address=f"127.0.0.1:{1000 + rank}")
        full = a.expect(n.RunJob)
        before = until(client, job.job_id, c.JOB_STATE_RUNNING)

        away = []
        states = []
        events = []

        def watch():
            for update in client.watch(job.job_id, on_away=away.append):
                if update.WhichOneof("update") == "job":
                    states.append(update.job.state)
                elif update.WhichOneof("update") == "event":
                    events.append(update.event.seq)

        watcher = threading.Thread(target=watch)
        watcher.start()
        first.end(signal.SIGKILL)
        second = start(listen=first.address)
        assert second.address == first.address and second.token == first.token
        jobs = [held(job, 0), held(job, 1)]
        for rank, one in enumerate(jobs):
            one.engine_address = f"127.0.0.1:{1000 + rank}"
        a, b = connect(second, "a", jobs=jobs[:1]), connect(second, "b", jobs=jobs[1:])
        assert a.expect(n.RunJob) == full  # the same wish, the same generation
        b.expect(n.RunJob)
        time.sleep(2.0)  # longer than a lease: nothing is lost
        after = client.get(job.job_id)
        assert (after.state, after.generation, after.reason) == (before.state, 1, before.reason)
        assert a.quiet(0.1) and b.quiet(0.1)

        for peer, rank in ((a, 0), (b, 1)):
            peer.report(run, n.LOCAL_PHASE_STARTED, {rank: DONE})
        for peer in (a, b):
            peer.report(peer.expect(n.StopJob), n.LOCAL_PHASE_STOPPED)
        until(client, job.job_id, c.JOB_STATE_SUCCEEDED)
        watcher.join(20)
        assert states[-1] == c.JOB_STATE_SUCCEEDED
        assert away and "No coordinator answers" in away[0]
        assert events == [event.seq for event in client.events(job.job_id)]


def test_a_coordinator_that_stood_still_blames_no_node(start, connect, run_on):
    """A machine that sleeps, or a starved processor: what was sent meanwhile is read before anybody counts as lost."""
    coordinator = start()
    a = connect(coordinator, "a")
    with coordinator.client() as client:
        job = run_on(client, a)
        for _ in range(3):
            coordinator.process.send_signal(signal.SIGSTOP)
            time.sleep(2.0)  # longer than a lease
            coordinator.process.send_signal(signal.SIGCONT)
            assert a.quiet(0.3)  # no StopJob
        assert client.get(job.job_id).state == c.JOB_STATE_RUNNING


def test_nodes_that_do_not_come_back_have_one_lease(start, connect, until):
    first = start()
    a = connect(first, "a")
    with first.client() as client:
        job = submit(client)
        a.expect(n.RunJob)
        first.end(signal.SIGKILL)
        time.sleep(2.0)  # longer than a lease: the time while nobody was there does not count
        started = time.monotonic()
        start(listen=first.address)
        ended = until(client, job.job_id, c.JOB_STATE_FAILED)
        assert time.monotonic() - started > 1.4
        assert "has not been heard of for 1.5 s" in ended.reason


def test_a_stop_in_good_order_leaves_jobs_running(start, connect, run_on):
    first = start()
    a = connect(first, "a")
    with first.client() as client:
        job = run_on(client, a)
        stream = client.watch(job.job_id, patience_s=0)
        next(stream)
        logs = client.logs(job.job_id, follow=True, patience_s=0)
        code, errors = first.end(signal.SIGTERM)
        assert code == 0, errors
        assert "Traceback" not in errors
        with pytest.raises(UnavailableError, match="the coordinator is stopping"):
            list(stream)
        with pytest.raises(UnavailableError):
            list(logs)
        assert not (first.state_dir / "coordinator" / "coordinator.json").exists()
        second = start(listen=first.address)
        connect(second, "a", jobs=(held(job, 0),)).expect(n.RunJob)
    with second.client() as client:
        assert client.get(job.job_id).state == c.JOB_STATE_RUNNING


def test_a_coordinator_that_was_replaced_meanwhile_is_refused(start, connect, until, tmp_path, postgres_url):
    one = start("--database-url", postgres_url, state_dir=tmp_path / "one")
    two = start("--database-url", postgres_url, state_dir=tmp_path / "two")
    a, b = connect(one, "a"), connect(one, "b")
    with one.client() as client, two.client() as other:
        job = submit(client, 2, elastic=True)
        run = a.expect(n.RunJob)
        b.expect(n.RunJob)
        for peer, rank in ((a, 0), (b, 1)):
            status = {**RUNNING, "member": rank}
            peer.report(run, n.LOCAL_PHASE_STARTED, {rank: status}, engine_address=f"127.0.0.1:{1000 + rank}")
        until(other, job.job_id, c.JOB_STATE_RUNNING)
        one.process.send_signal(signal.SIGSTOP)
        killed = {"state": c.RANK_STATE_EXITED, "exit_code": -9, "signal": 9}
        a2 = connect(two, "a", jobs=(held(job, 0, member=0),))
        connect(two, "b", jobs=(held(job, 1, member=1, **killed),))
        while (newer := a2.expect(n.RunJob)).generation < 2:
            pass
        assert [list(host.members) for host in newer.hosts] == [[0]]
        a2.report(newer, n.LOCAL_PHASE_STARTED, {0: {**RUNNING, "member": 0}}, entered=2)
        # The first one wakes, and finds what its nodes said before, and that their streams are gone.
        one.process.send_signal(signal.SIGCONT)
        with one.client() as woken:
            assert woken.pause(job.job_id).generation >= 2, "it acts on what it finds, not on what it knew"
        until(other, job.job_id, c.JOB_STATE_WAITING)
        events = list(other.events(job.job_id))
        assert [event.kind for event in events].count("regrouped") == 1
        assert [event.seq for event in events] == list(range(1, len(events) + 1))


@pytest.mark.full  # eight seconds
async def test_a_daemon_leaves_a_coordinator_that_is_stopped_before_its_lease_is_over(start):
    """Another one may lead meanwhile, and would give the node up."""
    coordinator = start()
    endpoint = Endpoint(coordinator.address, coordinator.token_file, None)
    hello = n.Hello(node_id="a", hostname="a", address="127.0.0.1", slots=1, version="test", boot_id="boot-1")
    async with endpoint.channel() as channel:
        call = NodeServiceStub(channel).Session(metadata=call_metadata(coordinator.token))
        await call.write(n.NodeFact(hello=hello))
        assert (await call.read()).HasField("welcome")
        coordinator.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(grpc.aio.AioRpcError):
                async with asyncio.timeout(Settings().lease_s):
                    while await call.read() is not grpc.aio.EOF:
                        pass
        finally:
            coordinator.process.send_signal(signal.SIGCONT)
