"""The life of jobs, seen from both ends of the wire: a user's client, and node daemons that the test plays."""

import grpc
import pytest

from bagua.base.errors import InvalidRequestError, NotFoundError
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

from .conftest import DONE, RUNNING


def spec(nnodes=2, nproc=2, **more):
    given = {"placement_timeout_s": 30.0, "stop_grace_s": 1.0, "args": ["--epochs", "1"], **more}
    return c.JobSpec(name="digits", entry="train.py", nnodes=nnodes, nproc_per_node=nproc, **given)


def test_a_job_runs_on_two_nodes_and_succeeds(coordinator, client, connect, until):
    a, b = connect(coordinator, "a"), connect(coordinator, "b")
    job = client.submit(spec())
    runs = {"a": a.expect(n.RunJob), "b": b.expect(n.RunJob)}
    assert [list(host.ranks) for host in runs["a"].hosts] == [[0, 1], [2, 3]]
    assert [host.node_id for host in runs["a"].hosts] == ["a", "b"]
    assert (runs["a"].host_index, runs["b"].host_index) == (0, 1)
    assert runs["a"].generation == 1 and len(runs["a"].job_key) == 32 and runs["a"].job_key == runs["b"].job_key
    assert runs["a"].spec == spec() and runs["a"].master_addr == "127.0.0.1" and runs["a"].master_port
    assert not any(host.engine_address for host in runs["a"].hosts)

    for peer, ranks, port in ((a, (0, 1), 1001), (b, (2, 3), 1002)):
        peer.report(runs["a"], n.LOCAL_PHASE_STARTED, dict.fromkeys(ranks, RUNNING), engine_address=f"127.0.0.1:{port}")
    for peer in (a, b):
        again = peer.expect(n.RunJob)
        assert [host.engine_address for host in again.hosts] == ["127.0.0.1:1001", "127.0.0.1:1002"]
    running = until(client, job.job_id, c.JOB_STATE_RUNNING)
    assert running.generation == 1 and running.started_at >= running.created_at

    for peer, ranks in ((a, (0, 1)), (b, (2, 3))):
        peer.report(runs["a"], n.LOCAL_PHASE_STARTED, dict.fromkeys(ranks, DONE))
    for peer, ranks in ((a, (0, 1)), (b, (2, 3))):
        stop = peer.expect(n.StopJob)
        assert stop.grace_s == 1.0
        peer.report(stop, n.LOCAL_PHASE_STOPPED, dict.fromkeys(ranks, DONE))
    ended = until(client, job.job_id, c.JOB_STATE_SUCCEEDED)
    assert ended.reason == "all 4 ranks ended with exit code 0"
    assert [rank.node_id for rank in ended.ranks] == ["a", "a", "b", "b"]
    kinds = [event.kind for event in client.events(job.job_id)]
    assert kinds[:2] == ["submitted", "placed"] and kinds.count("rank_started") == 2
    assert [event.seq for event in client.events(job.job_id)] == list(range(1, len(kinds) + 1))
    assert a.quiet(0.2) and b.quiet(0.2)


def test_bad_specs_are_refused_with_the_name_of_the_field(client):
    for more, words in (
        ({"nproc": 0}, "nproc_per_node must be at least 1"),
        ({"nnodes": 0}, "nnodes must be at least 1"),
        ({"nnodes": 100_000, "nproc": 2}, "100000 x 2: a job can have 100000 ranks"),
        ({"nnodes": 4_000_000_000, "nproc": 4_000_000_000}, "100000 ranks at most"),
        ({"workdir": "relative"}, "workdir must be an absolute path"),
        ({"env": {"A=B": "x"}}, "can't be the name of an environment variable"),
        ({"env": {"": "x"}}, "can't be the name"),
        ({"args": ["a\0b"]}, "args contains a NUL"),
        ({"args": ["x"] * 20_000}, "args has 20000 entries"),
        ({"args": ["x" * 600_000]}, "args has 600000 bytes"),
        ({"python": "p" * 5_000}, "python has 5000 characters"),
        ({"placement_timeout_s": float("nan")}, "placement_timeout_s is nan"),
        ({"stop_grace_s": -1.0}, "stop_grace_s is -1"),
        ({"master_port": 70_000}, "ports end at 65535"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            client.submit(spec(**more))


def test_what_is_not_there_is_named(client):
    with pytest.raises(InvalidRequestError, match="idempotency_key"):
        client.submit(spec(), idempotency_key="k" * 300)
    for call in (client.get, client.cancel, lambda job: list(client.events(job)), lambda job: list(client.watch(job))):
        with pytest.raises(NotFoundError, match="There is no job 'job-none'"):
            call("job-none")
    with pytest.raises(NotFoundError):
        list(client.logs("job-none"))


def test_a_watcher_who_does_not_read_misses_no_event(coordinator, client, connect, until, run_on):
    """How much progress is dropped depends on gRPC's windows: unit/coordinator/test_coordinator_memory.py has it."""
    a = connect(coordinator, "a")
    run = run_on(client, a)
    job_id = run.job_id
    updates = client.watch(job_id)
    next(updates)
    filler = "x" * 1_500
    for step in range(3_000):
        a.send(n.NodeFact(progress=c.Progress(job_id=job_id, step=step, message=filler)))
    a.report(run, n.LOCAL_PHASE_STARTED, {0: DONE})
    a.report(a.expect(n.StopJob), n.LOCAL_PHASE_STOPPED)
    until(client, job_id, c.JOB_STATE_SUCCEEDED)
    rest = list(updates)
    assert rest[-1].job.state == c.JOB_STATE_SUCCEEDED
    seen = {update.event.seq for update in rest if update.WhichOneof("update") == "event"}
    assert seen >= {event.seq for event in client.events(job_id, after_seq=1)}


# ---- nodes that come, go and lie


def test_a_second_daemon_of_an_id_is_refused_while_the_first_lives_and_wins_over_a_dead_one(coordinator, connect):
    connect(coordinator, "a")
    second = connect(coordinator, "a", boot_id="boot-2", welcome=False)
    with pytest.raises(grpc.RpcError, match="The node id 'a' is in use by another daemon, on host-of-a"):
        second.next()
    dead = connect(coordinator, "b", heartbeat_s=0)  # hangs: its connection stays open
    second = connect(coordinator, "b", boot_id="boot-2")
    with pytest.raises(grpc.RpcError, match="replaced by a newer session"):
        dead.next()
    assert second.quiet(0.3)


def test_unknown_jobs_are_stopped(shared, connect):
    held = n.LocalJob(job_id="job-of-another-database", generation=3, phase=n.LOCAL_PHASE_STARTED)
    a = connect(shared, "a", jobs=(held,))
    stop = a.expect(n.StopJob)
    assert (stop.job_id, stop.generation) == ("job-of-another-database", 3)
    a.report(stop, n.LOCAL_PHASE_STOPPED)
    assert a.quiet()


def test_bad_introductions_and_facts_end_the_session(shared, connect):
    for hello, words in (
        (n.NodeFact(heartbeat=n.Heartbeat()), "must be a hello"),
        (n.NodeFact(hello=n.Hello(hostname="h", address="a", boot_id="b")), "node_id is empty"),
        (n.NodeFact(hello=n.Hello(node_id="x" * 300, address="a", boot_id="b")), "node_id has 300 characters"),
        (n.NodeFact(hello=n.Hello(node_id="x", address="a", boot_id="b", slots=10**6)), "slots is 1000000"),
        (n.NodeFact(hello=n.Hello(node_id="x", address="a")), "boot_id is empty"),
    ):
        with pytest.raises(grpc.RpcError, match=words):
            connect(shared, "", welcome=False, hello=hello).next()
    for fact, words in (
        (n.NodeFact(job=n.LocalJob(job_id="", generation=1)), "the id or the number of ranks"),
        (n.NodeFact(job=n.LocalJob(job_id="j", phase=99)), "99 is not a valid Phase"),
        (n.NodeFact(progress=c.Progress(job_id="j", message="x" * 5_000)), "progress: 100 metrics"),
        (n.NodeFact(hello=n.Hello(node_id="a")), "a hello comes first and once"),
    ):
        a = connect(shared, "a")  # it may come again
        a.send(fact)
        with pytest.raises(grpc.RpcError, match=words):
            a.next()
