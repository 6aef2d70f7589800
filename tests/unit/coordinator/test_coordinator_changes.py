"""Elastic jobs: planned changes, pauses, and waits for nodes."""

from dataclasses import replace

import pytest
from rig.coordinator.elastic_job import OPTIONS, WALL, Cluster, killed, over

from bagua.base.errors import ConflictError, InvalidRequestError
from bagua.daemon.coordinator.rounds import requests
from bagua.daemon.coordinator.rules.decide import apply, decide
from bagua.daemon.coordinator.rules.domain import JobState, Phase, Plan
from bagua.daemon.coordinator.streams.directives import NOWHERE, Order, wish
from bagua.daemon.coordinator.streams.sessions import NodeSession, Sessions
from bagua.proto import node_pb2

# ---- planned changes


def test_scale_down_and_up():
    c = Cluster("abc", least=1, most=3)
    job = c.asks(requests.scale, 1)
    assert (job.generation, job.plan, c.members()) == (2, Plan.PLANNED, [("a", [0, 1])])
    assert job.reason == "generation 2: b, c leave; 2 ranks from the next step on"
    run = c.run("b")
    assert (run.host_index, run.planned, [host.node_id for host in run.hosts]) == (NOWHERE, True, ["a"])
    job = c.asks(requests.scale, 3)
    assert not job.joining, "first the change takes place"
    c.enter()
    assert c.run("b").planned, "whatever the others do"
    assert not c.job.joining, "there is room once they have gone"
    c.says("b", over(2), over(3), phase=Phase.STOPPED, entered=1)
    job = c.decide()
    assert c.joining() == [("b", [6, 7])] and job.former[0].phase is Phase.STOPPED
    c.says("c", over(4), over(5), phase=Phase.STOPPED, entered=1)
    c.ready("b")
    c.enter()
    assert c.joining() == [("c", [8, 9])]


def test_a_node_leaves_after_its_step_also_when_its_newcomers_are_not_wanted_any_more():
    """It would end the job for all, did it stop while they are in its generation."""
    c = Cluster("abc", least=1, most=3, respawn=2)
    c.says("c", killed(5))
    c.decide()
    c.enter()
    assert c.joining() == [("c", [6])]
    c.says("c", entered=2)
    c.asks(requests.scale, 2)
    assert (c.job.plan, c.members(), c.joining()) == (Plan.PLANNED, [("a", [0, 1]), ("b", [2, 3])], [])
    left = [part for part in c.job.former if part.node_id == "c" and part.phase is not Phase.STOPPED]
    assert sorted(part.dismissed for part in left) == [False, True]
    assert c.run("c").planned
    sessions = Sessions(lambda: None)
    session = NodeSession("c", "boot c", "")
    sessions.add(session)
    sessions.send(c.job.job_id, c.job.parts, sessions.order(c.job))
    told = [session.outgoing.get_nowait() for _ in range(session.outgoing.qsize())]
    assert [node_pb2.Directive.FromString(one).run.planned for one in told] == [True]


def test_who_was_dismissed_and_hangs_is_stopped():
    """A loss lets the others go on at once, so nobody waits for the step of that rank any more."""
    c = Cluster("abc")
    c.asks(requests.scale, 2)
    assert c.run("c").planned
    c.decide(at=1000.0)
    assert c.run("c").planned, "the step may take long"
    c.says("b", *(killed(rank.number) for rank in c.job.hosts[1].ranks), entered=1)
    c.decide()
    c.enter()
    (part,) = [part for part in c.job.former if part.node_id == "c"]
    assert part.dismissed and c.wake() is not None
    c.decide(at=OPTIONS.leave_s - 1)
    assert next(part for part in c.job.former if part.node_id == "c").dismissed
    job, events = apply(c.job, decide(c.job, c.views, c.now + 1, OPTIONS), c.now + 1, WALL)
    assert [(event.kind, event.reason) for event in events] == [
        ("stopped", "c is stopped: its ranks were to leave, and have not ended 90 s after the others went on")
    ]
    (part,) = [part for part in job.former if part.node_id == "c"]
    order = node_pb2.Directive.FromString(Order(wish(job), job).to(part))
    assert order.stop.generation == job.generation and order.stop.grace_s == 5.0


def test_a_drained_node_leaves_and_another_comes():
    c = Cluster("ab", most=2)
    c.there("c")
    assert not c.decide().joining
    c.views["b"] = replace(c.views["b"], asked_to_drain=True)
    c.decide()
    assert c.members() == [("a", [0, 1])] and [part.node_id for part in c.job.former if part.dismissed] == ["b"]
    c.enter()
    assert c.joining() == [("c", [4, 5])]


def test_a_drained_node_stays_until_the_minimum_is_there_without_it():
    c = Cluster("ab", least=2, most=2)
    c.views["b"] = replace(c.views["b"], leaving=True)
    assert c.decide().generation == 1
    c.there("c")
    c.decide()
    assert c.joining() == [("c", [4, 5])] and c.job.generation == 1
    c.ready("c")
    assert (c.job.plan, c.members()) == (Plan.PLANNED, [("a", [0, 1]), ("c", [4, 5])])


def test_the_last_node_that_drains_leaves_when_another_has_state():
    c = Cluster("a", most=1)
    c.views["a"] = replace(c.views["a"], leaving=True)
    c.there("b")
    c.decide()
    c.ready("b")
    assert (c.job.generation, c.members()) == (2, [("a", [0, 1]), ("b", [2, 3])])
    assert c.enter(newcomers=True).generation == 2
    assert c.enter().generation == 3 and c.members() == [("b", [2, 3])]


# ---- pauses and waits


def test_pause_and_resume():
    c = Cluster("ab")
    job = c.asks(requests.pause)
    assert (job.state, job.reason, job.generation, job.plan) == (JobState.WAITING, "paused", 2, Plan.HOLD)
    run = c.run("a")
    assert (run.planned, run.hold, run.waiting, len(run.hosts)) == (True, True, "paused", 2)
    c.there("c")
    assert not c.decide().joining
    job = c.asks(requests.resume)
    assert (job.state, job.generation, job.plan) == (JobState.RUNNING, 3, Plan.PLANNED)
    assert job.reason == "generation 3: it goes on; 4 ranks from the next step on"
    c.says("a", entered=1)
    assert c.decide().generation == 3
    assert c.enter().joining


def test_a_loss_in_a_pause():
    c = Cluster("abc")
    c.asks(requests.pause)
    c.says("b", killed(2), entered=1, suspended="rank 2 is gone")
    job = c.decide()
    assert (job.state, job.generation, job.plan) == (JobState.WAITING, 3, Plan.STANDSTILL)
    assert c.members()[1] == ("b", [3]) and job.reason == "paused; rank 2 on node b was killed by SIGKILL"
    assert c.run("a").hold and c.decide(1_000.0).generation == 3
    job = c.asks(requests.resume)
    assert (job.state, job.generation, job.plan) == (JobState.RUNNING, 4, Plan.AT_ONCE), (
        "a step may have to be repeated"
    )


def test_below_the_minimum_a_job_waits():
    c = Cluster("ab", least=2)
    c.says("b", killed(2), killed(3))
    c.says("a", entered=1, suspended="host 1 hung up", suspended_nodes=("b",))
    job = c.decide()
    assert (job.state, job.plan, c.members()) == (JobState.WAITING, Plan.STANDSTILL, [("a", [0, 1])])
    assert job.reason.startswith("1 of 2 nodes: rank 2 on node b was killed by SIGKILL")
    assert c.run("a").waiting == job.reason and c.joining() == [], "b holds something of it still"
    c.says("b", killed(2), killed(3), phase=Phase.STOPPED)
    assert c.decide().joining and c.job.state is JobState.WAITING


def test_newcomers_end_a_wait():
    c = Cluster("ab", least=2)
    c.says("b", killed(2), killed(3), phase=Phase.STOPPED)
    c.says("a", entered=1, suspended="host 1 hung up", suspended_nodes=("b",))
    c.decide()
    assert c.job.state is JobState.WAITING and c.joining() == [("b", [4, 5])]
    job = c.ready("b")
    assert (job.state, job.plan, c.members()) == (JobState.RUNNING, Plan.AT_ONCE, [("a", [0, 1])]), "the step first"
    assert c.joining() == [("b", [4, 5])]
    job = c.enter()
    assert (job.generation, job.plan, c.members()) == (4, Plan.PLANNED, [("a", [0, 1]), ("b", [4, 5])])


def test_the_last_one_dies_while_the_job_waits():
    c = Cluster("ab", least=2)
    c.says("b", killed(2), killed(3), phase=Phase.STOPPED)
    c.decide()
    c.says("a", killed(0), killed(1))
    assert (c.decide().state, c.job.outcome) == (JobState.STOPPING, JobState.FAILED)


# ---- wishes that can't be met


def test_refusals():
    c = Cluster("ab", least=2, most=3)
    with pytest.raises(InvalidRequestError, match="submitted for 2 to 3 nodes"):
        requests.scale(c.job, 4)
    with pytest.raises(InvalidRequestError):
        requests.scale(c.job, 1)
    plain = replace(c.job, spec=replace(c.job.spec, elastic=False))
    for change in (requests.pause, requests.resume):
        with pytest.raises(ConflictError, match="is not elastic"):
            change(plain)
    with pytest.raises(ConflictError, match="once all its ranks were started"):
        requests.pause(replace(c.job, state=JobState.PENDING))
    with pytest.raises(ConflictError, match="is being stopped"):
        requests.pause(replace(c.job, state=JobState.STOPPING))
    requests.last_of("a", [c.job])
    alone = Cluster("a")
    with pytest.raises(ConflictError, match="is the last one of job job-1"):
        requests.last_of("a", [alone.job])
