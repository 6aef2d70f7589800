"""Decisions about one job: placement, causes, ends."""

from dataclasses import replace

import pytest

from bagua.daemon.coordinator.rules.decide import Decision, apply, decide
from bagua.daemon.coordinator.rules.domain import (
    JobRecord,
    JobSpec,
    JobState,
    LocalJob,
    LocalRank,
    NodeView,
    Phase,
    RankState,
)
from bagua.daemon.coordinator.rules.observe import forget, observe
from bagua.daemon.coordinator.rules.options import Options

OPTIONS = Options(lease_s=10, settle_s=1, start_s=600, fence_s=60)  # gone after 63 s


def spec(nnodes=2, nproc=2, timeout=30):
    return JobSpec("job", nnodes, nproc, timeout, 5.0, 0, b"")


def node(name, slots=2, used=0, connected=True, heard=100.0):
    return NodeView(name, f"host-{name}", "10.0.0.1", "boot", slots, used, connected, heard)


def nodes(*views):
    return {view.node_id: view for view in views}


AB = nodes(node("a"), node("b"))


WALL = 1e9  # by the clock for people: no decision depends on it


def job(**more):
    return JobRecord("job-1", spec(), created_at=WALL, submitted_clock=100.0, **more)


def placed():
    start = job()
    return apply(start, decide(start, AB, 100.0, OPTIONS), 100.0, WALL)[0]


def of_releases(**numbers):
    return {name: replace(node(name), wire_version=number, version=f"1.{number}") for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("numbers", "nnodes", "expected"),
    [
        ({"a": 1, "b": 2, "c": 2}, 2, "bc"),
        ({"a": 1, "b": 1, "c": 2, "d": 2}, 2, "cd"),  # the newest of equals
        ({"a": 1, "b": 2, "c": 1, "d": 1, "e": 2}, 3, "acd"),
        ({"a": 0, "b": 0, "c": 1}, 2, "ab"),  # daemons that do not say it are of one release
    ],
)
def test_a_job_is_placed_over_nodes_that_can_talk(numbers, nnodes, expected):
    record = replace(job(), spec=spec(nnodes))
    decision = decide(record, of_releases(**numbers), 100.0, OPTIONS)
    assert decision.placement is not None and [view.node_id for view in decision.placement] == list(expected)


def says(record, name, phase=Phase.STARTED, now=101.0, **more):
    ranks = more.pop("ranks", ())
    fact = LocalJob(record.job_id, record.generation, phase, ranks=tuple(ranks), **more)
    return observe(record, name, more.pop("boot_id", "boot"), fact, now, WALL)[0]


def ran(*ranks):
    return [LocalRank(rank, RankState.RUNNING, pid=1) for rank in ranks]


def over(rank, **more):
    return LocalRank(rank, RankState.EXITED, pid=1, **more)


def running():
    record = says(says(placed(), "a", ranks=ran(0, 1)), "b", ranks=ran(2, 3))
    return step(record, 102.0)


def step(record, now, views=AB):
    return apply(record, decide(record, views, now, OPTIONS), now, WALL + now)[0]


# ---- placement


def test_the_first_nodes_by_id_are_taken_and_ranks_are_contiguous():
    record = apply(job(), decide(job(), nodes(node("c"), node("b", 4), node("a", 1)), 100, OPTIONS), 100, WALL)[0]
    assert record.state is JobState.STARTING
    assert record.generation == 1
    assert [(host.node_id, host.first_rank, host.nranks) for host in record.hosts] == [("b", 0, 2), ("c", 2, 2)]
    assert [(rank.rank, rank.local_rank, rank.node_id) for rank in record.ranks] == [
        (0, 0, "b"),
        (1, 1, "b"),
        (2, 0, "c"),
        (3, 1, "c"),
    ]
    assert record.reason == "placed on b, c"


def test_waiting_ends_with_the_timeout():
    assert decide(job(), {}, 129.9, OPTIONS).state is None
    decision = decide(job(), {}, 130.0, OPTIONS)
    assert decision.state is JobState.FAILED
    assert decision.reason == "waited 30 s, but the job needs 2 nodes with 2 free slots each; connected: none"


def test_after_a_restart_nodes_get_time_to_come_back():
    options = replace(OPTIONS, started_clock=500.0)
    assert decide(job(), {}, 501.0, options).state is None
    assert decide(job(), {}, 510.0, options).state is JobState.FAILED


# ---- running


def test_running_when_every_rank_was_started():
    half = says(placed(), "a", ranks=ran(0, 1))
    assert decide(half, AB, 101, OPTIONS) == Decision(wake_at=700.0)
    assert running().state is JobState.RUNNING
    assert running().reason == "all 4 ranks started"


# ---- causes


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (over(2, exit_code=1, reason="ValueError: 3 is\n  no good"), "exited with code 1: ValueError: 3 is\n  no good"),
        (over(2, exit_code=3), "exited with code 3"),
        (over(2, exit_code=-9, signal=9, error_tail="step 7\n"), "was killed by SIGKILL"),
        (over(2, exit_code=-9, signal=9, reason="Memory is full."), "was killed by SIGKILL. Memory is full."),
        (over(2, exit_code=-99, signal=99), "was killed by signal 99"),
    ],
)
def test_a_rank_that_ends_badly_fails_the_job_at_once(rank, reason):
    record = step(says(running(), "b", ranks=[rank]), 103)
    assert (record.state, record.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert record.reason == f"rank 2 on node b {reason}"


def test_a_rank_that_has_told_why_it_fails_is_waited_for():
    told = LocalRank(2, RankState.RUNNING, pid=1, reason="ValueError: x")
    record = says(
        says(running(), "b", now=103.0, ranks=[told]), "a", now=103.0, ranks=[over(0, exit_code=1, follows=True)]
    )
    waits = step(record, 103.0 + OPTIONS.told_s - 0.1)
    assert waits.state is JobState.RUNNING
    assert step(says(record, "b", now=104, ranks=[over(2, exit_code=7, reason="ValueError: x")]), 104).reason == (
        "rank 2 on node b exited with code 7: ValueError: x"
    )
    assert step(record, 103.0 + OPTIONS.told_s).reason == "rank 2 on node b has failed: ValueError: x"


def test_the_first_death_is_the_cause_even_if_others_are_seen_first():
    record = says(running(), "a", ranks=[over(0, exit_code=1, exited_at=50.2, reason="OSError: gone")])
    record = says(record, "b", ranks=[over(3, exit_code=1, exited_at=50.1, reason="KeyError: 'x'")])
    assert step(record, 103).reason == "rank 3 on node b exited with code 1: KeyError: 'x'"


def test_what_follows_from_a_death_waits_for_its_cause():
    """Connections break before the process that held them is reaped."""
    record = says(running(), "a", now=103.0, error="the connection to node b is lost")
    tail = "bagua.base.errors.CommunicationError: the connection to node b is lost"
    record = says(record, "a", now=103.1, ranks=[over(0, exit_code=1, exited_at=1.0, error_tail=tail, follows=True)])
    decision = decide(record, AB, 103.2, OPTIONS)
    assert (decision.state, decision.wake_at) == (None, 104.0)
    late = says(record, "b", now=103.5, ranks=[over(2, exit_code=-9, signal=9, exited_at=2.0)])
    assert step(late, 103.5).reason == "rank 2 on node b was killed by SIGKILL"
    assert step(record, 104.0).reason == "node a (host-a): the connection to node b is lost"


def test_a_daemon_that_shuts_down_is_the_cause_of_its_ranks_sigterm():
    killed = over(2, exit_code=-15, signal=15)
    record = says(running(), "b", Phase.STOPPED, error="the daemon is shutting down", ranks=[killed])
    assert step(record, 103).reason == "node b (host-b): the daemon is shutting down"


def test_an_error_that_hurt_no_rank_does_not_fail_the_job():
    record = says(running(), "a", error="late trouble", ranks=[over(0), over(1)])
    record = step(says(record, "b", ranks=[over(2), over(3)]), 110)
    assert record.outcome is JobState.SUCCEEDED


def test_a_node_is_lost_after_a_lease_without_a_session():
    away = nodes(node("a"), node("b", connected=False, heard=105.0))
    decision = decide(running(), away, 110.0, OPTIONS)
    assert (decision.state, decision.wake_at) == (None, 115.0)
    record = step(running(), 115.0, away)
    assert (record.outcome, record.reason) == (JobState.FAILED, "node b (host-b) has not been heard of for 10 s")
    record = says(record, "a", Phase.STOPPED)
    # Its daemon ends the ranks when it can't renew its lease for 60 s: until then they may compute.
    assert decide(record, away, 116.0, OPTIONS) == Decision(wake_at=168.0)
    assert step(record, 167.9, away).state is JobState.STOPPING
    assert step(record, 168.0, away).state is JobState.FAILED


def test_a_restarted_coordinator_gives_every_node_a_lease():
    away = nodes(node("a"), node("b", connected=False, heard=105.0))
    options = replace(OPTIONS, started_clock=200.0)
    assert decide(running(), away, 209.0, options) == Decision(wake_at=210.0)
    assert decide(running(), away, 210.0, options).state is JobState.STOPPING


def test_ranks_that_are_not_started_in_time_fail_the_job():
    record = says(placed(), "a", ranks=ran(0, 1))
    assert decide(record, AB, 699.0, OPTIONS) == Decision(wake_at=700.0)
    record = step(record, 700.0)
    assert record.outcome is JobState.FAILED
    assert record.reason == ("not all ranks were started within 600 s: missing on b; no word of the job came from b")


# ---- a host that another one has lost

KILLED = "the daemon on node b was killed by SIGKILL. The kernel's out-of-memory killer ended a process of its cgroup"


def lost_b():
    """Its engine ends with the daemon, and the other one sees that at once."""
    return says(running(), "a", Phase.STOPPED, 103.0, error="lost host 1", suspended_nodes=("b",))


def test_a_daemon_that_is_started_again_says_why_it_was_killed():
    views = nodes(node("a"), node("b", heard=102.0))
    record = lost_b()
    assert decide(record, views, 104.5, OPTIONS) == Decision(wake_at=113.0)
    record = says(record, "b", Phase.STOPPED, 105.0, error=KILLED, withdrawn=True)
    assert step(record, 105, views).reason == KILLED


def test_a_host_that_lives_is_not_waited_for():
    views = nodes(node("a"), node("b", heard=103.5))
    assert step(lost_b(), 104.5, views).reason == "node a (host-a): lost host 1"


def test_a_host_that_says_nothing_more_is_named():
    assert step(lost_b(), 113, nodes(node("a"), node("b", heard=102.0))).reason == (
        "node b (host-b) is silent, and node a has lost it"
    )
    views = nodes(node("a"), replace(node("b", connected=False, heard=102.0), hung_up=True))
    assert decide(lost_b(), views, 103.5, OPTIONS).wake_at == 104
    assert step(lost_b(), 104, views).reason == "node b (host-b) is gone: its session ended, and node a has lost it"


# ---- facts


def test_a_restarted_daemon_has_lost_its_jobs():
    record, _ = forget(running(), "b", "another boot", 103, WALL)
    assert step(record, 103).reason == "the daemon of node b was restarted"
    assert record.hosts[1].phase is Phase.STOPPED


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("a", LocalJob("job-1", 2, Phase.STOPPED)),
        ("z", LocalJob("job-1", 1, Phase.STOPPED)),
        ("a", LocalJob("job-1", 1, Phase.UNKNOWN, ranks=tuple(ran(2, 3, 4_000_000)))),
    ],
)
def test_facts_that_do_not_concern_the_job_change_nothing(name, fact):
    assert observe(placed(), name, "boot", fact, 101, WALL) == (placed(), ())


def test_what_a_node_says_is_bounded():
    record = replace(job(), spec=spec(1, 200))
    record = apply(record, decide(record, nodes(node("a", 200)), 100, OPTIONS), 100, WALL)[0]
    tail = "x" * 50_000 + "\nValueError: short"
    record = says(record, "a", error="y" * 50_000, ranks=[over(i, exit_code=1, error_tail=tail) for i in range(200)])
    assert len(record.hosts[0].error) == 2_000
    assert len(observe(record, "a", "boot", LocalJob("job-1", 1, Phase.STOPPED), 103, WALL)[1]) == 1
    assert sum(len(rank.error_tail) for rank in record.ranks) < 300_000
    assert all(rank.error_tail.endswith("ValueError: short") for rank in record.ranks)
