"""The life of jobs, seen from both ends of the wire: a user's client, and node daemons that the test plays."""

from __future__ import annotations

from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

RUNNING = {"state": c.RANK_STATE_RUNNING, "pid": 77}
DONE = {"state": c.RANK_STATE_EXITED, "pid": 77, "exited_at": 5.0}


def spec(nnodes: int = 2, nproc: int = 2, **more) -> c.JobSpec:
    return c.JobSpec(
        name="digits",
        entry="train.py",
        args=["--epochs", "1"],
        nnodes=nnodes,
        nproc_per_node=nproc,
        **{"placement_timeout_s": 30.0, "stop_grace_s": 1.0, **more},
    )


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
