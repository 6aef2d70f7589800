"""The life of jobs, seen from both ends of the wire: a user's client, and node daemons that the test plays."""

import time

import pytest
from rig.limits import SOON_S

from bagua.base.errors import ConflictError, InvalidRequestError, NotFoundError
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

RUNNING = {"state": c.RANK_STATE_RUNNING, "pid": 77}
DONE = {"state": c.RANK_STATE_EXITED, "pid": 77, "exited_at": 5.0}


def spec(nnodes=2, nproc=2, **more):
    given = {"placement_timeout_s": 30.0, "stop_grace_s": 1.0, "args": ["--epochs", "1"], **more}
    return c.JobSpec(name="digits", entry="train.py", nnodes=nnodes, nproc_per_node=nproc, **given)


def start_one_node_job(client, peer, until, nproc=2):
    job = client.submit(spec(1, nproc))
    run = peer.expect(n.RunJob)
    assert run.job_id == job.job_id
    peer.report(run, n.LOCAL_PHASE_STARTED, dict.fromkeys(range(nproc), RUNNING))
    until(client, job.job_id, c.JOB_STATE_RUNNING)
    return run


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


def test_a_failed_rank_stops_the_job_on_every_node(coordinator, client, connect, until):
    a, b = connect(coordinator, "a"), connect(coordinator, "b")
    job = client.submit(spec(2, 1))
    run = a.expect(n.RunJob)
    b.expect(n.RunJob)
    a.report(run, n.LOCAL_PHASE_STARTED, {0: RUNNING})
    b.report(run, n.LOCAL_PHASE_STARTED, {1: RUNNING})
    until(client, job.job_id, c.JOB_STATE_RUNNING)
    tail = "Traceback (most recent call last):\n  ...\nValueError: 3 is no good\n"
    b.report(
        run,
        n.LOCAL_PHASE_STARTED,
        {1: {**DONE, "exit_code": 1, "error_tail": tail, "reason": "ValueError: 3 is no good"}},
    )
    for peer, rank in ((a, 0), (b, 1)):
        stop = peer.expect(n.StopJob)
        assert stop.reason == "rank 1 on node b exited with code 1: ValueError: 3 is no good"
        killed = {rank: {**DONE, "exit_code": -15, "signal": 15}}
        peer.report(stop, n.LOCAL_PHASE_STOPPED, killed)
    ended = until(client, job.job_id, c.JOB_STATE_FAILED)
    assert ended.reason == "rank 1 on node b exited with code 1: ValueError: 3 is no good"
    assert ended.ranks[1].error_tail == tail and ended.ranks[1].exit_code == 1
    assert ended.ranks[0].signal == 15


def test_a_job_waits_for_nodes_and_says_for_what(coordinator, client, connect, until):
    a = connect(coordinator, "a", slots=2)
    first, second = client.submit(spec(1, 2)), None
    run = a.expect(n.RunJob)
    second = client.submit(spec(1, 2))
    for update in client.watch(second.job_id):
        if update.WhichOneof("update") == "job" and update.job.reason != "submitted":
            assert update.job.state == c.JOB_STATE_PENDING
            assert update.job.reason == "needs 1 node with 2 free slots; connected: a (0 of 2 free)"
            break
    a.report(run, n.LOCAL_PHASE_STARTED, {0: DONE, 1: DONE})
    a.report(a.expect(n.StopJob), n.LOCAL_PHASE_STOPPED, {0: DONE, 1: DONE})
    assert a.expect(n.RunJob).job_id == second.job_id
    until(client, first.job_id, c.JOB_STATE_SUCCEEDED)
    node = client.nodes()[0]
    assert (node.node_id, node.slots, node.used_slots, node.connected, node.version) == ("a", 2, 2, True, "test")


def test_a_job_that_does_not_fit_fails_with_figures(coordinator, client, connect, until):
    connect(coordinator, "a", slots=2)
    job = client.submit(spec(2, 4, placement_timeout_s=0.0))
    ended = until(client, job.job_id, c.JOB_STATE_FAILED)
    assert ended.reason == "needs 2 nodes with 4 free slots each; connected: a (2 of 2 free)"
    job = client.submit(spec(3, 1, placement_timeout_s=0.3))
    assert "waited 0.3 s" in until(client, job.job_id, c.JOB_STATE_FAILED).reason


def test_cancel_waiting_and_running_jobs(coordinator, client, connect, until):
    waiting = client.submit(spec(9, 9))
    client.cancel(waiting.job_id)
    assert until(client, waiting.job_id, c.JOB_STATE_CANCELLED).reason == "cancelled"
    a = connect(coordinator, "a")
    run = start_one_node_job(client, a, until)
    client.cancel(run.job_id, "enough of it")
    client.cancel(run.job_id, "again")
    stop = a.expect(n.StopJob)
    assert stop.reason == "cancelled: enough of it"
    a.report(stop, n.LOCAL_PHASE_STOPPED, {0: DONE, 1: {**DONE, "exit_code": 1}})
    ended = until(client, run.job_id, c.JOB_STATE_CANCELLED)
    assert ended.reason == "cancelled: enough of it"
    assert client.cancel(run.job_id, "too late") == client.get(run.job_id)


def test_lists_and_idempotent_submits(coordinator, client):
    first = client.submit(spec(), idempotency_key="k")
    assert client.submit(spec(), idempotency_key="k").job_id == first.job_id
    with pytest.raises(ConflictError, match=f"{first.job_id} was submitted with it"):
        client.submit(spec(1, 1), idempotency_key="k")
    others = [client.submit(spec(9, 9)).job_id for _ in range(3)]
    assert [job.job_id for job in client.list(limit=4)] == [*reversed(others), first.job_id]
    assert [job.job_id for job in client.list(limit=2)] == [others[2], others[1]]
    assert not {*others, first.job_id} & {job.job_id for job in client.list(states=[c.JOB_STATE_FAILED])}
    assert client.list()[0].spec.entry == "train.py"


@pytest.mark.parametrize(
    ("more", "words"),
    [
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
    ],
)
def test_bad_specs_are_refused_with_the_name_of_the_field(client, more, words):
    with pytest.raises(InvalidRequestError, match=words):
        client.submit(spec(**more))


def test_what_is_not_there_is_named(client):
    with pytest.raises(InvalidRequestError, match=r"spec\.entry is empty"):
        client.submit(c.JobSpec(nnodes=1, nproc_per_node=1))
    with pytest.raises(InvalidRequestError, match="idempotency_key"):
        client.submit(spec(), idempotency_key="k" * 300)
    for call in (client.get, client.cancel, lambda job: list(client.events(job)), lambda job: list(client.watch(job))):
        with pytest.raises(NotFoundError, match="There is no job 'job-none'"):
            call("job-none")
    with pytest.raises(NotFoundError):
        list(client.logs("job-none"))


def test_progress_reaches_watchers_and_lookers(coordinator, client, connect, until):
    a = connect(coordinator, "a")
    run = start_one_node_job(client, a, until)
    updates = client.watch(run.job_id)
    for update in updates:
        if update.WhichOneof("update") == "job":
            break
    a.send(n.NodeFact(progress=c.Progress(job_id=run.job_id, step=3, total=10, metrics={"loss": 0.5})))
    progress = next(update.progress for update in updates if update.WhichOneof("update") == "progress")
    assert (progress.step, progress.total, dict(progress.metrics)) == (3, 10, {"loss": 0.5})
    assert client.get(run.job_id).progress.step == 3


def test_a_watcher_who_does_not_read_misses_no_event(coordinator, client, connect, until):
    a = connect(coordinator, "a")
    run = start_one_node_job(client, a, until)
    updates = client.watch(run.job_id)
    next(updates)
    filler = "x" * 1_500
    for step in range(3_000):
        a.send(n.NodeFact(progress=c.Progress(job_id=run.job_id, step=step, message=filler)))
    a.report(run, n.LOCAL_PHASE_STARTED, {0: DONE, 1: DONE})
    a.report(a.expect(n.StopJob), n.LOCAL_PHASE_STOPPED)
    until(client, run.job_id, c.JOB_STATE_SUCCEEDED)
    rest = list(updates)
    assert rest[-1].job.state == c.JOB_STATE_SUCCEEDED
    seen = {update.event.seq for update in rest if update.WhichOneof("update") == "event"}
    assert seen >= {event.seq for event in client.events(run.job_id, after_seq=1)}
    # How much progress is dropped depends on gRPC's windows: unit/coordinator/test_coordinator_memory.py has the bound.


# ---- nodes that come, go and lie


def test_a_lost_node_fails_the_job(coordinator, client, connect, until):
    a, b = connect(coordinator, "a"), connect(coordinator, "b")
    job = client.submit(spec(2, 1))
    run = a.expect(n.RunJob)
    a.report(run, n.LOCAL_PHASE_STARTED, {0: RUNNING})
    b.report(run, n.LOCAL_PHASE_STARTED, {1: RUNNING})
    until(client, job.job_id, c.JOB_STATE_RUNNING)
    b.close()
    began = time.monotonic()
    stop = a.expect(n.StopJob)
    assert 1.0 < time.monotonic() - began < SOON_S
    assert stop.reason == "node b (host-of-b) has not been heard of for 1.5 s"
    a.report(stop, n.LOCAL_PHASE_STOPPED)
    assert until(client, job.job_id, c.JOB_STATE_FAILED).reason == stop.reason
    # When it comes back with the job still running there, it is told to stop it, and gets no other work before.
    held = n.LocalJob(
        job_id=run.job_id, generation=1, phase=n.LOCAL_PHASE_STARTED, ranks=[c.RankStatus(rank=1, **RUNNING)]
    )
    again = connect(coordinator, "b", jobs=(held,))
    assert again.expect(n.StopJob).job_id == run.job_id
    assert {node.node_id: node.used_slots for node in client.nodes() if node.connected} == {"a": 0, "b": 1}
    again.report(run, n.LOCAL_PHASE_STOPPED)
    other = client.submit(spec(2, 2))
    assert again.expect(n.RunJob).job_id == other.job_id


def test_a_silent_session_ends_and_its_node_counts_as_lost(coordinator, client, connect, until):
    a = connect(coordinator, "a", heartbeat_s=0)
    job = client.submit(spec(1, 1))
    a.expect(n.RunJob)
    ended = until(client, job.job_id, c.JOB_STATE_FAILED)
    assert "node a (host-of-a) has not been heard of for 1.5 s" in ended.reason


def test_a_broken_stream_changes_nothing(coordinator, client, connect, until):
    a = connect(coordinator, "a")
    run = start_one_node_job(client, a, until)
    a.close()
    held = n.LocalJob(job_id=run.job_id, generation=1, phase=n.LOCAL_PHASE_STARTED)
    again = connect(coordinator, "a", jobs=(held,))
    assert again.expect(n.RunJob) == run  # the wish is said again
    time.sleep(2.0)  # longer than the lease
    assert client.get(run.job_id).state == c.JOB_STATE_RUNNING


def test_a_job_that_never_reached_its_node_is_sent_again(coordinator, client, connect):
    a = connect(coordinator, "a")
    job = client.submit(spec(1, 1))
    a.expect(n.RunJob)
    a.close()  # before it could do anything
    again = connect(coordinator, "a")
    assert again.expect(n.RunJob).job_id == job.job_id


def test_a_restarted_daemon_has_lost_its_jobs(coordinator, client, connect, until):
    a = connect(coordinator, "a")
    run = start_one_node_job(client, a, until)
    a.close()
    connect(coordinator, "a", boot_id="boot-2")
    ended = until(client, run.job_id, c.JOB_STATE_FAILED)
    assert ended.reason == "the daemon of node a was restarted"


def test_a_second_daemon_with_the_same_id_is_refused_while_the_first_lives(shared, connect):
    connect(shared, "a")
    second = connect(shared, "a", boot_id="boot-2", welcome=False)
    with pytest.raises(Exception, match="The node id 'a' is in use by another daemon, on host-of-a"):
        second.next()


def test_a_second_daemon_wins_over_a_dead_one(coordinator, client, connect):
    first = connect(coordinator, "a", heartbeat_s=0)  # hangs: its connection stays open
    second = connect(coordinator, "a", boot_id="boot-2")
    with pytest.raises(Exception, match="replaced by a newer session"):
        first.next()
    assert second.quiet(0.3)
    assert [node.connected for node in client.nodes() if node.node_id == "a"] == [True]


def test_a_heartbeat_is_acknowledged_where_that_is_asked_for(coordinator, connect):
    a = connect(coordinator, "a", welcome=False)
    welcome = a.expect(n.Welcome)
    assert (welcome.lease_s, welcome.fence_s, welcome.sole) == (1.5, 1.5, True)
    a.send(n.NodeFact(heartbeat=n.Heartbeat()))
    a.send(n.NodeFact(heartbeat=n.Heartbeat(seq=2**40)))
    ack = a.expect(n.HeartbeatAck)
    assert (ack.seq, ack.heartbeat_s) == (2**40, welcome.heartbeat_s)  # one node speaks as often as it likes
    answered = []
    for seq in range(1, 1_000):  # the daemon goes on asking until it has an answer
        a.send(n.NodeFact(heartbeat=n.Heartbeat(seq=seq)))
        if not a.quiet(0.01):
            answered.append(seq)
            break
    assert answered


def test_unknown_jobs_are_stopped(shared, connect):
    held = n.LocalJob(job_id="job-of-another-database", generation=3, phase=n.LOCAL_PHASE_STARTED)
    a = connect(shared, "a", jobs=(held,))
    stop = a.expect(n.StopJob)
    assert (stop.job_id, stop.generation) == ("job-of-another-database", 3)
    a.report(stop, n.LOCAL_PHASE_STOPPED)
    assert a.quiet()


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (n.NodeFact(heartbeat=n.Heartbeat()), "must be a hello"),
        (n.NodeFact(hello=n.Hello(hostname="h", address="a", boot_id="b")), "node_id is empty"),
        (n.NodeFact(hello=n.Hello(node_id="x" * 300, address="a", boot_id="b")), "node_id has 300 characters"),
        (n.NodeFact(hello=n.Hello(node_id="x", address="a", boot_id="b", slots=10**6)), "slots is 1000000"),
        (n.NodeFact(hello=n.Hello(node_id="x", address="a")), "boot_id is empty"),
    ],
)
def test_a_bad_introduction_is_refused(shared, connect, fact, words):
    peer = connect(shared, "", welcome=False, hello=fact)
    with pytest.raises(Exception, match=words):
        peer.next()


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (n.NodeFact(job=n.LocalJob(job_id="", generation=1)), "the id or the number of ranks"),
        (n.NodeFact(job=n.LocalJob(job_id="j", phase=99)), "99 is not a valid Phase"),
        (n.NodeFact(progress=c.Progress(job_id="j", message="x" * 5_000)), "progress: 100 metrics"),
        (n.NodeFact(hello=n.Hello(node_id="a")), "a hello comes first and once"),
    ],
)
def test_a_bad_fact_ends_the_session(shared, connect, fact, words):
    a = connect(shared, "a")
    a.send(fact)
    with pytest.raises(Exception, match=words):
        a.next()
    connect(shared, "a")  # and may come again


def test_the_pause_after_newcomers_that_failed(start, connect, until):
    """It is an operator's setting, and doubles each time."""
    coordinator = start(BAGUA_COORDINATOR_REJOIN_S="0.2")
    with coordinator.client() as client:
        member = {"state": c.RANK_STATE_RUNNING, "pid": 7}
        here = connect(coordinator, "n0", slots=1)
        job = client.submit(spec(1, 1, elastic=True, max_nodes=2))
        run = here.expect(n.RunJob)
        here.report(run, n.LOCAL_PHASE_STARTED, {0: {**member, "member": 0}}, entered=1, takes_newcomers=True)
        until(client, job.job_id, c.JOB_STATE_RUNNING)
        other = connect(coordinator, "n1", slots=1)
        for number in (1, 2, 3):
            wave = other.expect(n.RunJob)
            assert [list(host.members) for host in wave.joining] == [[number]]
            failed = {"state": c.RANK_STATE_EXITED, "exit_code": 1, "member": number, "newcomer": True}
            other.report(wave, n.LOCAL_PHASE_STARTED, {0: failed})
            while not isinstance(directive := other.next(), n.StopJob):
                pass
            other.report(directive, n.LOCAL_PHASE_STOPPED, {0: failed})
        words = [event.reason for event in client.events(job.job_id) if event.kind == "newcomers_lost"]
        pauses = [text.rpartition("; ")[2] for text in words]
        assert pauses == [f"others are started in {pause} s at the earliest" for pause in (0.2, 0.4, 0.8)]
        client.cancel(job.job_id)
