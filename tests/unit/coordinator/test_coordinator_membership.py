"""Elastic jobs: evidence of losses, and the next generation."""

import copy
from dataclasses import replace

import pytest
from rig.coordinator.elastic_job import OPTIONS, WALL, Cluster, killed, over

from bagua.daemon.coordinator.rules.decide import decide
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState, LocalRank, Phase, RankState
from bagua.daemon.coordinator.rules.observe import forget
from bagua.daemon.coordinator.streams.directives import Order, Run, concerns, wish
from bagua.proto import node_pb2


def running(least=0):
    """Three nodes with two ranks each, which nobody joins."""
    return Cluster("abc", least=least, most=3, takes=False)


def pending(least=0):
    """The same before it was placed."""
    c = running(least)
    c.job = JobRecord("job-1", c.job.spec, WALL, submitted_clock=c.now)
    return c


def away(c, *names):
    """The sessions of these nodes have ended now."""
    for name in names:
        c.views[name] = replace(c.views[name], connected=False, heard_clock=c.now, hung_up=True)


def suspended(c):
    """The connection between the first two hosts broke."""
    for host, other in zip(c.job.hosts[:2], (1, 0), strict=True):
        c.says(host.node_id, suspended=f"host {other} hung up", suspended_hosts=(other,))


def test_a_rank_that_is_killed_while_others_are_started_is_a_loss():
    """Node c is slow. The job goes on without the rank as soon as all others are there."""
    c = pending()
    c.decide()
    c.says("a")
    c.says("b", killed(2))
    assert c.decide(5.0).state is JobState.STARTING
    c.says("c")
    assert (c.decide(1.0).state, c.job.generation) == (JobState.RUNNING, 2)
    assert c.job.reason == "generation 2: rank 2 on node b was killed by SIGKILL; 5 ranks go on"
    assert c.members() == [("a", [0, 1]), ("b", [3]), ("c", [4, 5])]


def test_a_killed_rank_is_a_loss():
    c = running()
    c.says("b", killed(2))
    assert (c.decide().state, c.job.generation) == (JobState.RUNNING, 2)
    assert c.job.reason == "generation 2: rank 2 on node b was killed by SIGKILL; 5 ranks go on"
    assert c.members() == [("a", [0, 1]), ("b", [3]), ("c", [4, 5])]
    [former] = c.job.former
    assert (former.node_id, former.last_generation, [rank.number for rank in former.ranks]) == ("b", 1, [2])
    c.says("c", killed(4), killed(5))
    assert c.decide().generation == 3 and c.members() == [("a", [0, 1]), ("b", [3])]
    words = "generation 3: rank 3 (member 4) on node c was killed by SIGKILL; rank 4 (member 5)"
    assert c.job.reason.startswith(words)


def test_what_the_nodes_are_told():
    c = running()
    c.says("c", killed(4), killed(5))
    c.says("a", killed(0))
    wanted = wish(c.decide())
    assert wanted == Run("job-1", 2, ("::1:a", "::1:b")), "who stays listens where it did: peers come at once"
    assert [host.node_id for host in c.job.parts if concerns(wanted, host)] == ["a", "b", "c"]
    order = Order(wanted, c.job)
    run = node_pb2.Directive.FromString(order.to(c.job.hosts[1])).run
    assert [(list(host.ranks), list(host.members)) for host in run.hosts] == [([0], [1]), ([1, 2], [2, 3])]
    (out,) = [host for host in c.job.former if host.phase is not Phase.STOPPED]
    stop = node_pb2.Directive.FromString(order.to(out)).stop
    assert (out.node_id, stop.generation) == ("c", 2)
    assert stop.reason == "the job goes on without this node since generation 2" and stop.others_go_on
    c.says("c", phase=Phase.STOPPED, generation=1)
    assert [host.node_id for host in c.job.parts if concerns(wanted, host)] == ["a", "b"]


def test_an_exception_ends_the_job():
    c = running()
    c.says("b", over(2, exit_code=1, reason="ValueError: x"), killed(3))
    assert (c.decide().state, c.job.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert "exited with code 1: ValueError: x" in c.job.reason


def test_an_error_of_an_engine_ends_the_job_whoever_is_lost_beside_it():
    c = running()
    c.says("b", error="shapes differ")
    c.says("a", killed(0))
    assert c.decide(0.5).state is JobState.RUNNING and c.wake() == c.now + 0.5
    assert (c.decide(0.5).state, c.job.reason) == (JobState.STOPPING, "node b: shapes differ")


def test_a_node_that_is_lost_before_all_were_started_is_a_loss():
    """Node c is slow: the job waits for it, and not for b."""
    c = pending()
    c.decide()
    c.says("a", entered=0)
    away(c, "b")
    assert c.decide(5.0).state is JobState.STARTING and c.wake() == c.now + 5.0
    assert c.decide(10.0).state is JobState.STARTING
    c.says("c", entered=0)
    assert c.decide().reason == "generation 2: node b has not been heard of for 10 s; 4 ranks go on"
    assert c.members() == [("a", [0, 1]), ("c", [4, 5])]


def test_all_nodes_are_lost_before_their_ranks_were_started():
    c = pending()
    c.decide()
    away(c, *"abc")
    assert c.decide(20.0).state is JobState.STARTING, "nobody is heard: it may be the coordinator"
    c.there("d")
    assert (c.decide().state, c.job.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert c.job.reason == "; ".join(f"node {name} has not been heard of for 10 s" for name in "abc")


# ---- nodes


def test_a_lost_session_and_a_broken_connection_are_a_loss_at_once():
    c = running()
    c.says("a", suspended="host 1 hung up", suspended_hosts=(1,))
    assert c.decide(0.1).generation == 1, "a broken connection alone"
    away(c, "b")
    c.decide()
    assert c.job.reason == "generation 2: node b is gone: its session ended, and node a has lost it, too; 4 ranks go on"
    assert c.members() == [("a", [0, 1]), ("c", [4, 5])]
    assert not any(host.suspended or host.lost_hosts or host.suspended_clock for host in c.job.hosts)
    assert c.job.former[0].phase is Phase.STARTED, "its ranks may run still: it holds its slots"


def test_nobody_who_is_away_itself_is_a_witness():
    c = running()
    suspended(c)
    away(c, "a", "b")
    assert c.decide(0.1).generation == 1


@pytest.mark.parametrize("how", ["stops", "restarts", "has nothing"])
def test_a_node_that_ends_its_part_is_a_loss(how):
    c, words = running(), "node b has nothing left of the job"
    if how == "stops":
        words = "the daemon on node b was stopped (SIGTERM)"
        c.says("b", error=words, withdrawn=True)
    elif how == "restarts":
        words = "the daemon of node b was restarted"
        c.says("b", boot="another boot")
    else:
        c.job = forget(c.job, "b", "boot b", c.now, WALL)[0]
    assert c.decide().reason == f"generation 2: {words}; 4 ranks go on"


def test_a_former_node_is_heard_in_any_generation_and_holds_its_slots_until_then():
    c = running()
    away(c, "b")
    job = c.decide(OPTIONS.gone_s())
    assert c.says("b", generation=1, suspended="cut off") == job and job.generation == 2, "it is told to stop"
    assert forget(job, "b", "boot b", c.now, WALL)[0].former[0].phase is Phase.STOPPED
    assert copy.copy(c).says("b", boot="another boot", generation=1).former[0].phase is Phase.STOPPED
    done = c.says("b", over(2, exit_code=-15, signal=15), over(3), generation=1, phase=Phase.STOPPED)
    assert done.former[0].phase is Phase.STOPPED and [rank.signal for rank in done.former[0].ranks] == [15, 0]


def test_it_begins_on_fewer_nodes_where_that_is_allowed():
    c = pending(least=2)
    del c.views["b"]
    exact, short = copy.copy(c), copy.copy(c)
    assert [host.node_id for host in c.decide().hosts] == ["a", "c"]
    exact.job = replace(exact.job, spec=replace(exact.job.spec, min_nodes=0))
    assert exact.decide().state is JobState.PENDING
    short.views = {"a": c.views["a"]}
    assert short.decide().reason.startswith("needs 2 nodes with 2 free slots each")


# ---- the end


def test_who_ended_well_is_no_member_of_the_next_generation():
    c = running()
    c.says("a", over(0))
    assert c.decide().generation == 1, "that alone begins none"
    c.says("c", killed(4))
    c.decide()
    assert c.members() == [("a", [1]), ("b", [2, 3]), ("c", [5])]
    for name, *ended in (("a", over(1)), ("b", over(2), over(3)), ("c", over(5))):
        c.says(name, *ended)
    assert (c.decide().state, c.job.outcome) == (JobState.STOPPING, JobState.SUCCEEDED)
    assert c.job.reason == "all 4 ranks ended with exit code 0"


def test_who_has_taken_leave_may_end_first():
    c = running()
    c.says("a", LocalRank(0, RankState.RUNNING, 100, member=0, left=True))
    c.says("c", killed(4))
    assert c.decide().generation == 1, "it can't be a member, and it must not be killed"
    c.says("a", over(0))
    c.decide()
    assert c.members()[0] == ("a", [1])


def test_a_death_when_all_others_have_ended_well_is_no_success():
    c = running()
    for name, *ended in (("a", over(0), over(1)), ("b", over(2), over(3)), ("c", over(4), killed(5))):
        c.says(name, *ended)
    assert (c.decide().state, c.job.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert c.job.reason == "rank 5 on node c was killed by SIGKILL; no rank is left that runs"


# ---- nobody is to blame


def test_a_broken_connection_alone_keeps_all_members():
    c = running()
    suspended(c)
    assert decide(c.job, c.views, c.now + 0.1, OPTIONS).wake_at == pytest.approx(c.now + 0.2)
    assert c.decide(0.3).reason == "generation 2: node a: host 1 hung up; 6 ranks go on"
    assert c.members() == [("a", [0, 1]), ("b", [2, 3]), ("c", [4, 5])] and not c.job.former


def test_connections_that_break_again_and_again_end_the_job():
    c = running()

    def breaks(c, after=1.0):
        c.now += after
        suspended(c)
        return c

    for generation in (2, 3, 4):
        breaks(c).decide(0.2)
        assert (c.job.generation, c.job.stalls) == (generation, generation - 1)
    later, lost = breaks(copy.copy(c), 61.0), breaks(copy.copy(c))
    assert (later.decide(0.2).generation, later.job.stalls) == (5, 1), "it had gone on for a while"
    lost.says("c", killed(4))
    assert (lost.decide().generation, lost.job.stalls) == (5, 0), "that was a cause"
    breaks(c).decide(0.2)
    assert (c.job.state, c.job.outcome) == (JobState.STOPPING, JobState.FAILED)
    words = "the connections broke 4 times in a row, though no member is lost; the last time: node a: host 1 hung up"
    assert c.job.reason == words


def test_members_keep_their_numbers_in_facts_of_older_generations():
    c = running()
    c.says("b", killed(2))
    job = c.decide()
    assert copy.copy(c).says("b", killed(3), generation=3) == job
    late = c.says("b", killed(2), killed(3), generation=1, suspended="rank 2 is gone")
    assert not late.hosts[1].suspended, "that was the engine of the last generation"
    c.decide()
    assert c.members() == [("a", [0, 1]), ("c", [4, 5])], "its second death is news"
