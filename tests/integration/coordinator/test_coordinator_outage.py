"""PostgreSQL, or a coordinator, is away: daemons are told for how long they may count on not being given up."""

import asyncio
import contextlib
import itertools
import queue
import signal
import socket
import time

import grpc
import pytest
import sqlalchemy as sa

from bagua.base.errors import ServiceError
from bagua.cli.faults.postgres import Postgres
from bagua.daemon.coordinator.host.other_coordinators import database_refuses
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

from .conftest import DONE, RUNNING, WAIT_S, held

LEASE_S = FENCE_S = 1.5
SLOW_S = 6.0
_SEQUENCE = itertools.count(1)


@pytest.fixture
def postgres():
    try:
        server = Postgres()
    except ServiceError as error:
        pytest.skip(f"PostgreSQL: {error}")
    yield server
    server.close()


def hello(node_id, *jobs):
    """Of a daemon that waits while the database is away."""
    more = {"hostname": node_id, "address": "127.0.0.1", "slots": 2, "version": "test", "boot_id": "boot-1"}
    return n.NodeFact(hello=n.Hello(node_id=node_id, waits=True, jobs=jobs, **more))


def pair(start, folder, url, lease_s):
    """Two coordinators with one token on one database."""
    settings = {f"BAGUA_COORDINATOR_{name}": f"{lease_s}" for name in ("LEASE_S", "JOB_LEASE_S", "FENCE_AFTER")}
    token = ("--token-file", str(folder / "token"))
    names = ("one", "two")
    return [start("--database-url", url, *token, state_dir=folder / name, **settings) for name in names]


def grant(peer):
    """As the next acknowledgement tells it. A daemon goes on asking until one comes."""
    seq = next(_SEQUENCE)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        peer.send(n.NodeFact(heartbeat=n.Heartbeat(seq=seq)))
        with contextlib.suppress(queue.Empty):
            found = peer.next(timeout=0.5)
            if isinstance(found, n.HeartbeatAck) and found.seq == seq:
                return found.grant
    raise AssertionError("no acknowledgement came")


def until_granted(peer, condition):
    deadline = time.monotonic() + WAIT_S
    while not condition(found := grant(peer)):
        assert time.monotonic() < deadline, found
    return found


def test_daemons_are_told_who_else_could_decide(start, connect, tmp_path, postgres_url):
    one = start("--database-url", postgres_url, state_dir=tmp_path / "one")
    first = connect(one, "a", welcome=False).expect(n.Welcome)
    assert not first.sole and first.grant.refusals_s > 500 and set(first.grant.coordinators) <= {one.address}
    two = start("--database-url", postgres_url, state_dir=tmp_path / "two")
    peer = connect(one, "b")
    found = until_granted(peer, lambda told: set(told.coordinators) == {one.address, two.address})
    assert found.refusals_s > 500
    until_granted(peer, lambda told: told.age_s < LEASE_S)
    two.end(signal.SIGKILL)
    until_granted(peer, lambda told: told.coordinators == [one.address])


def test_a_stream_that_begins_while_the_database_is_away(start, connect, until, run_on, postgres):
    """Terms come at once and heartbeats are acknowledged; Welcome and decisions follow when the database is back."""
    coordinator = start("--database-url", postgres.url)
    a = connect(coordinator, "a", hello=hello("a"))
    with coordinator.client() as client:
        job = run_on(client, a)
        postgres.kill()
        a.close()
        a = connect(coordinator, "a", welcome=False, hello=hello("a", held(job, 0)))
        terms = a.next()
        assert isinstance(terms, n.Welcome) and terms.fence_s == FENCE_S and terms.grant.age_s == 0
        began, seq = time.monotonic(), 0
        while time.monotonic() < began + 4 * FENCE_S:
            seq += 1
            a.send(n.NodeFact(heartbeat=n.Heartbeat(seq=seq)))
            ack = a.expect(n.HeartbeatAck)
            assert ack.seq == seq and ack.grant.age_s == 0, "it is alone"
            time.sleep(0.2)
        old = connect(coordinator, "b", welcome=False)
        with pytest.raises(grpc.RpcError, match="database"):
            old.next()  # a daemon of an older version would not understand
        postgres.start()
        while not isinstance(directive := a.next(), n.RunJob):
            assert isinstance(directive, n.Welcome)
        until(client, job.job_id, c.JOB_STATE_RUNNING)
        a.report(directive, n.LOCAL_PHASE_STARTED, {0: DONE})
        a.report(a.expect(n.StopJob), n.LOCAL_PHASE_STOPPED)
        ended = until(client, job.job_id, c.JOB_STATE_SUCCEEDED, c.JOB_STATE_FAILED)
        assert ended.state == c.JOB_STATE_SUCCEEDED and ended.generation == 1, ended.reason


def test_two_coordinators_whose_database_is_away_blame_nobody(start, connect, until, run_on, tmp_path, postgres):
    """Neither has heard of the other one for long when it is back, and neither has lost its nodes. Each tries again
    within two seconds, which is less than a lease."""
    one, two = pair(start, tmp_path, postgres.url, SLOW_S)
    a = connect(one, "a")
    with one.client() as client, two.client() as other:
        jobs = [run_on(client, a), run_on(other, a)]
        b = connect(two, "b")
        until_granted(b, lambda told: told.coordinators)
        postgres.kill()
        time.sleep(2 * SLOW_S)
        until_granted(b, lambda told: told.age_s < SLOW_S)  # it refuses, or is silent for the other one, too
        postgres.start()
        time.sleep(SLOW_S)
        for job in jobs:
            assert until(client, job.job_id, c.JOB_STATE_RUNNING, c.JOB_STATE_FAILED).state == c.JOB_STATE_RUNNING
        assert all(node.connected for node in other.nodes())


@pytest.mark.parametrize("daemon", ["silent", pytest.param("gone", marks=pytest.mark.full)])
def test_a_host_is_lost_whose_daemon_talked_to_the_other_coordinator(start, connect, tmp_path, postgres_url, daemon):
    """Its session has ended, or it is silent, and a peer has lost it: nobody waits for the end of a lease."""
    one, two = pair(start, tmp_path, postgres_url, 2 * WAIT_S)
    spec = c.JobSpec(entry="t.py", nnodes=2, nproc_per_node=1, elastic=True, min_nodes=1, stop_grace_s=1)
    a, b = connect(one, "a", slots=1), connect(two, "b", slots=1, heartbeat_s=0)
    with one.client() as client:
        deadline = time.monotonic() + WAIT_S
        while sum(node.connected for node in client.nodes()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job = client.submit(spec)
        for peer, rank in ((a, 0), (b, 1)):
            entered = {"entered": 1, "engine_address": f"127.0.0.1:{7000 + rank}"}
            peer.report(peer.expect(n.RunJob), n.LOCAL_PHASE_STARTED, {rank: RUNNING}, **entered)
        run = a.expect(n.RunJob)
        while not all(host.engine_address for host in run.hosts):
            run = a.expect(n.RunJob)
        if daemon == "gone":
            b.close()
        lost = {"suspended": "lost host 1", "suspended_hosts": [1], "suspended_nodes": ["b"]}
        a.report(run, n.LOCAL_PHASE_STARTED, {0: RUNNING}, **{**entered, "engine_address": "127.0.0.1:7000"}, **lost)
        while run.generation == 1:
            run = a.expect(n.RunJob)
        assert [host.node_id for host in run.hosts] == ["a"]
        assert client.get(job.job_id).state == c.JOB_STATE_RUNNING


async def test_a_port_of_a_database_that_refuses(postgres, postgres_url, tmp_path, monkeypatch):
    for name in ("PGHOST", "PGPORT"):
        monkeypatch.delenv(name, raising=False)
    socket_url, url = sa.make_url(postgres.url), sa.make_url(postgres_url)
    assert not await database_refuses(socket_url) and not await database_refuses(url)
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused = server.getsockname()[1]
    nobody = url.set(port=unused)
    assert await database_refuses(nobody)
    assert not await database_refuses(nobody.set(query={"host": ("127.0.0.1", "127.0.0.1")})), "or another"
    assert not await database_refuses(nobody.set(host="nowhere.invalid"))
    assert not await database_refuses(sa.make_url("sqlite:///there.db"))
    assert await database_refuses(socket_url.set(query={"host": str(tmp_path)}))
    postgres.kill()
    for _ in range(200):  # a child that began at that moment holds the listening socket a little longer
        if await database_refuses(socket_url):
            break
        await asyncio.sleep(0.05)
    assert await database_refuses(socket_url), "its socket is still there"
