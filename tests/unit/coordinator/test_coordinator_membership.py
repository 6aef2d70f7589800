"""Elastic jobs: evidence of losses, and the next generation."""

from dataclasses import replace

import pytest

from bagua.daemon.coordinator.rules.decide import apply, decide
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
from bagua.daemon.coordinator.streams.directives import Order, Run, concerns, wish
from bagua.proto import common_pb2, node_pb2

OPTIONS = Options(lease_s=10, settle_s=1, regroup_s=0.2, stall_s=60, max_stalls=3)
WALL = 1e9
NODES = ("a", "b", "c")
WIRE = common_pb2.JobSpec(elastic=True).SerializeToString()


def views(**away):
    """``b=105.0``: the session of node b ended after it was heard of then."""
    return {
        name: NodeView(name, "", "::1", "boot", 2, 0, name not in away, away.get(name, 0.0), name in away)
        for name in NODES
    }


ALL = views()


def step(job, now=102.0, nodes=ALL):
    return apply(job, decide(job, nodes, now, OPTIONS), now, WALL)[0]


def says(job, name, *ranks, now=102.0, boot="boot", **more):
    fact = LocalJob(job.job_id, more.pop("generation", job.generation), more.pop("phase", Phase.STARTED), ranks=ranks)
    return observe(job, name, boot, replace(fact, **more), now, WALL)[0]


def ran(*members):
    return [LocalRank(member, RankState.RUNNING, 100 + member, member=member) for member in members]


def over(member, **more):
    return LocalRank(member, RankState.EXITED, 100 + member, member=member, **more)


def killed(member, signal=9):
    return over(member, exit_code=-signal, signal=signal)


def running(min_nodes=0, elastic=True):
    """Three nodes with two ranks each."""
    spec = JobSpec("job", 3, 2, 30, 5.0, 0, WIRE, elastic=elastic, min_nodes=min_nodes)
    job = step(JobRecord("job-1", spec, WALL, submitted_clock=100.0), 100.0)
    for number, name in enumerate(NODES):
        job = says(job, name, *ran(2 * number, 2 * number + 1), engine_address=f"::1:{number}")
    return step(job)


def members(job):
    assert [rank.rank for rank in job.ranks] == list(range(len(job.ranks)))
    assert [host.index for host in job.hosts] == list(range(len(job.hosts)))
    assert all([rank.local_rank for rank in host.ranks] == list(range(host.nranks)) for host in job.hosts)
    return [(host.node_id, [rank.number for rank in host.ranks]) for host in job.hosts]


def test_a_rank_that_is_killed_while_others_are_started_is_a_loss():
    """Node c is slow. The job goes on without the rank as soon as all others are there."""
    spec = JobSpec("job", 3, 2, 30, 5.0, 0, WIRE, elastic=True)
    job = step(JobRecord("job-1", spec, WALL, submitted_clock=100.0), 100.0)
    for number, name in enumerate(NODES[:2]):
        job = says(job, name, *ran(2 * number, 2 * number + 1), engine_address=f"::1:{number}")
    job = step(says(job, "b", killed(2), ran(3)[0]), 105.0)
    assert job.state is JobState.STARTING
    job = step(says(job, "c", *ran(4, 5), engine_address="::1:2", now=106.0), 106.0)
    assert (job.state, job.generation) == (JobState.RUNNING, 1)
    job = step(job, 106.0)
    assert (job.state, job.generation) == (JobState.RUNNING, 2)
    assert job.reason == "generation 2: rank 2 on node b was killed by SIGKILL; 5 ranks go on"
    assert members(job) == [("a", [0, 1]), ("b", [3]), ("c", [4, 5])]


def test_a_killed_rank_is_a_loss():
    job = step(says(running(), "b", killed(2)))
    assert (job.state, job.generation) == (JobState.RUNNING, 2)
    assert job.reason == "generation 2: rank 2 on node b was killed by SIGKILL; 5 ranks go on"
    assert members(job) == [("a", [0, 1]), ("b", [3]), ("c", [4, 5])]
    assert [(host.node_id, host.last_generation, [r.number for r in host.ranks]) for host in job.former] == [
        ("b", 1, [2])
    ]
    job = step(says(job, "c", killed(4), killed(5)))
    assert job.generation == 3 and members(job) == [("a", [0, 1]), ("b", [3])]
    assert job.reason.startswith("generation 3: rank 3 (member 4) on node c was killed by SIGKILL; rank 4 (member 5)")


def test_what_the_nodes_are_told():
    job = step(says(says(running(), "c", killed(4), killed(5)), "a", killed(0)))
    wanted = wish(job)
    assert wanted == Run("job-1", 2, ("::1:0", "::1:1")), "who stays listens where it did: peers come at once"
    assert [host.node_id for host in job.parts if concerns(wanted, host)] == ["a", "b", "c"]
    order = Order(wanted, job)
    run = node_pb2.Directive.FromString(order.to(job.hosts[1])).run
    assert [(list(host.ranks), list(host.members)) for host in run.hosts] == [([0], [1]), ([1, 2], [2, 3])]
    (out,) = [host for host in job.former if host.phase is not Phase.STOPPED]
    stop = node_pb2.Directive.FromString(order.to(out)).stop
    assert (out.node_id, stop.generation) == ("c", 2)
    assert stop.reason == "the job goes on without this node since generation 2" and stop.others_go_on
    job = says(job, "c", phase=Phase.STOPPED, generation=1)
    assert [host.node_id for host in job.parts if concerns(wanted, host)] == ["a", "b"]


@pytest.mark.parametrize(
    ("rank", "outcome", "words"),
    [
        (over(2, exit_code=1, reason="ValueError: x"), JobState.FAILED, "exited with code 1: ValueError: x"),
        (over(2, exit_code=3, exited_at=5.0), JobState.FAILED, "rank 2 on node b exited with code 3"),
    ],
)
def test_an_exception_ends_the_job(rank, outcome, words):
    job = step(says(running(), "b", rank, killed(3)))
    assert (job.state, job.outcome) == (JobState.STOPPING, outcome) and words in job.reason


def test_an_error_of_an_engine_ends_the_job_whoever_is_lost_beside_it():
    job = says(says(running(), "b", error="shapes differ"), "a", killed(0))
    assert decide(job, ALL, 102.5, OPTIONS).wake_at == 103.0
    job = step(job, 103.0)
    assert (job.state, job.reason) == (JobState.STOPPING, "node b: shapes differ")


def test_a_node_that_is_lost_before_all_were_started_is_a_loss():
    """Node c is slow: the job waits for it, and not for b."""
    job = step(JobRecord("job-1", running().spec, WALL, submitted_clock=100.0), 100.0)
    job = says(job, "a", *ran(0, 1), engine_address="::1:0")
    away = views(b=105.0)
    decided = decide(job, away, 110.0, OPTIONS)
    assert decided.state is None and decided.wake_at == 115.0
    job = step(job, 120.0, away)
    assert job.state is JobState.STARTING
    job = step(says(job, "c", *ran(4, 5), engine_address="::1:2", now=121.0), 121.0, away)
    assert (job.state, job.reason) == (JobState.RUNNING, "all 4 ranks started")
    job = step(job, 121.0, away)
    assert (job.generation, job.reason) == (2, "generation 2: node b has not been heard of for 10 s; 4 ranks go on")
    assert members(job) == [("a", [0, 1]), ("c", [4, 5])]


def test_all_nodes_are_lost_before_their_ranks_were_started():
    job = step(JobRecord("job-1", running().spec, WALL, submitted_clock=100.0), 100.0)
    away = views(a=105.0, b=105.0, c=105.0)
    assert step(job, 120.0, away).state is JobState.STARTING, "nobody is heard: it may be the coordinator"
    job = step(job, 120.0, {**away, "d": replace(ALL["a"], node_id="d")})
    silent = [f"node {name} has not been heard of for 10 s" for name in NODES]
    assert (job.state, job.outcome, job.reason) == (JobState.STOPPING, JobState.FAILED, "; ".join(silent))


# ---- nodes


def test_a_lost_session_and_a_broken_connection_are_a_loss_at_once():
    job = says(running(), "a", suspended="host 1 hung up", suspended_hosts=(1,))
    assert step(job, 102.1).generation == 1, "a broken connection alone"
    gone = views(b=102.0)
    assert decide(running(), gone, 102.1, OPTIONS).wake_at == 112.0, "a lost session alone"
    job = step(job, 102.1, gone)
    assert job.reason == ("generation 2: node b is gone: its session ended, and node a has lost it, too; 4 ranks go on")
    assert members(job) == [("a", [0, 1]), ("c", [4, 5])]
    assert not any(host.suspended or host.lost_hosts or host.suspended_clock for host in job.hosts)
    assert job.former[0].phase is Phase.STARTED, "its ranks may run still: it holds its slots"


def test_nobody_who_is_away_itself_is_a_witness():
    job = says(running(), "a", suspended="host 1 hung up", suspended_hosts=(1,))
    job = says(job, "b", suspended="host 0 hung up", suspended_hosts=(0,))
    assert step(job, 102.1, views(a=102.0, b=102.0)).generation == 1


def test_a_node_that_ends_its_part_is_a_loss():
    text = "the daemon on node b was stopped (SIGTERM)"
    job = step(says(running(), "b", error=text, withdrawn=True))
    assert job.reason == f"generation 2: {text}; 4 ranks go on"
    job = step(says(running(), "b", boot="another boot"))
    assert job.reason == "generation 2: the daemon of node b was restarted; 4 ranks go on"
    job = step(forget(running(), "b", "boot", 102.0, WALL)[0])
    assert job.reason == "generation 2: node b has nothing left of the job; 4 ranks go on"


def test_a_former_node_is_heard_in_any_generation_and_holds_its_slots_until_then():
    job = step(running(), 112.0, views(b=102.0))
    late = says(job, "b", *ran(2, 3), generation=1, suspended="cut off")
    assert late == job, "it is told to stop"
    done = says(job, "b", killed(2, 15), over(3), generation=1, phase=Phase.STOPPED)
    assert done.former[0].phase is Phase.STOPPED and [rank.signal for rank in done.former[0].ranks] == [15, 0]
    assert forget(job, "b", "boot", 120.0, WALL)[0].former[0].phase is Phase.STOPPED
    assert says(job, "b", boot="another boot", generation=1).former[0].phase is Phase.STOPPED


# ---- limits


def test_it_begins_on_fewer_nodes_where_that_is_allowed():
    job = JobRecord(
        "job-1", JobSpec("job", 3, 2, 30, 5.0, 0, WIRE, elastic=True, min_nodes=2), WALL, submitted_clock=100.0
    )
    two = {name: view for name, view in ALL.items() if name != "b"}
    assert [host.node_id for host in step(job, 100.0, two).hosts] == ["a", "c"]
    assert step(job, 100.0, {"a": ALL["a"]}).reason.startswith("needs 2 nodes with 2 free slots each")
    exact = replace(job, spec=replace(job.spec, min_nodes=0))
    assert step(exact, 100.0, two).state is JobState.PENDING


# ---- the end


def test_who_ended_well_is_no_member_of_the_next_generation():
    job = says(running(), "a", over(0))
    assert step(job).generation == 1, "that alone begins none"
    job = step(says(job, "c", killed(4)))
    assert members(job) == [("a", [1]), ("b", [2, 3]), ("c", [5])]
    job = says(says(says(job, "a", over(1)), "b", over(2), over(3)), "c", over(5))
    job = step(job)
    assert (job.state, job.outcome) == (JobState.STOPPING, JobState.SUCCEEDED)
    assert job.reason == "all 4 ranks ended with exit code 0"


def test_who_has_taken_leave_may_end_first():
    leaving = LocalRank(0, RankState.RUNNING, 100, member=0, left=True)
    job = says(says(running(), "a", leaving), "c", killed(4))
    assert step(job).generation == 1, "it can't be a member, and it must not be killed"
    assert members(step(says(job, "a", over(0))))[0] == ("a", [1])


def test_a_death_when_all_others_have_ended_well_is_no_success():
    job = says(says(running(), "a", over(0), over(1)), "b", over(2), over(3))
    job = step(says(job, "c", over(4), killed(5)))
    assert (job.state, job.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert job.reason == "rank 5 on node c was killed by SIGKILL; no rank is left that runs"


# ---- nobody is to blame


def suspended(job, now=102.0):
    """The connection between a and b broke."""
    names = [host.node_id for host in job.hosts]
    job = says(job, names[0], suspended="host 1 hung up", suspended_hosts=(1,), now=now)
    return says(job, names[1], suspended="host 0 hung up", suspended_hosts=(0,), now=now)


def test_a_broken_connection_alone_keeps_all_members():
    job = suspended(running())
    assert decide(job, ALL, 102.1, OPTIONS).wake_at == pytest.approx(102.2)
    job = step(job, 102.3)
    assert job.reason == "generation 2: node a: host 1 hung up; 6 ranks go on"
    assert members(job) == [("a", [0, 1]), ("b", [2, 3]), ("c", [4, 5])] and not job.former


def test_connections_that_break_again_and_again_end_the_job():
    job, now = running(), 102.0
    for generation in (2, 3, 4):
        now += 1.0
        job = step(suspended(job, now), now + 0.2)
        assert (job.generation, job.stalls) == (generation, generation - 1)
    later = step(suspended(job, now + 61.0), now + 61.2)
    assert (later.generation, later.stalls) == (5, 1), "it had gone on for a while"
    lost = step(says(suspended(job, now + 1.0), "c", killed(4)), now + 1.0)
    assert (lost.generation, lost.stalls) == (5, 0), "that was a cause"
    job = step(suspended(job, now + 1.0), now + 1.2)
    assert (job.state, job.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert job.reason == (
        "the connections broke 4 times in a row, though no member is lost; the last time: node a: host 1 hung up"
    )


# ---- facts of older generations


def test_members_keep_their_numbers_in_late_facts():
    job = step(says(running(), "b", killed(2)))
    late = says(job, "b", killed(2), killed(3), generation=1, suspended="rank 2 is gone")
    assert members(step(late)) == [("a", [0, 1]), ("c", [4, 5])], "its second death is news"
    assert not late.hosts[1].suspended, "that was the engine of the last generation"
    assert says(job, "b", killed(3), generation=3) == job
