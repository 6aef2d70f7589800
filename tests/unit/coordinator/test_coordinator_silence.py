"""Elastic jobs: nodes that are silent, or that others have lost."""

from dataclasses import replace

import pytest
from rig.coordinator.elastic_job import OPTIONS, Cluster

from bagua.daemon.coordinator.rules.domain import JobState, Phase, Plan
from bagua.daemon.coordinator.rules.evidence import find


def test_who_is_silent_and_accused_is_out_before_its_lease_is_over():
    c = Cluster("abc")
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.views["b"] = replace(c.views["b"], heard_clock=c.now - OPTIONS.silence_s)
    c.decide()
    assert c.job.reason == "generation 2: node b is silent, and node a has lost it; 4 ranks go on"


def test_a_daemon_that_is_started_again_has_its_time_from_the_loss_on():
    """Its last word may have been nearly a heartbeat old when it was killed."""
    c = Cluster("abc")
    c.says("a", suspended="the connection broke", suspended_nodes=("b",))
    c.views["b"] = replace(c.views["b"], heard_clock=c.now - 2.9)
    c.decide()
    assert c.job.generation == 1 and c.wake() == c.now + OPTIONS.silence_s
    c.decide(OPTIONS.silence_s)
    assert c.job.reason == "generation 2: node b is silent, and node a has lost it; 4 ranks go on"


def test_who_is_accused_and_speaks_is_no_loss():
    c = Cluster("abc")
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.says("b", suspended="no word from host 0", suspended_nodes=("a",))
    for name in "ab":
        c.views[name] = replace(c.views[name], heard_clock=c.now)
    assert c.decide().generation == 1 and c.wake() == pytest.approx(c.now + OPTIONS.regroup_s)
    assert c.decide(0.3).generation == 2 and len(c.members()) == 3


def test_a_host_that_its_peers_watch_has_more_time_than_its_lease():
    """They lose it after eight median steps, however long a step takes. Without their word it is out when its daemon
    has ended its ranks."""
    c = Cluster("abc")
    c.views["b"] = replace(c.views["b"], connected=False, heard_clock=c.now, hung_up=True)
    c.decide(OPTIONS.lease_s)
    assert c.job.generation == 1 and c.wake() == pytest.approx(c.now - OPTIONS.lease_s + OPTIONS.gone_s())
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.decide()
    assert c.job.generation == 2 and [host.node_id for host in c.job.hosts] == ["a", "c"]


def test_a_host_that_its_peers_watch_is_out_when_nothing_is_left_of_its_ranks():
    c = Cluster("abc")
    c.views["b"] = replace(c.views["b"], connected=False, heard_clock=c.now, hung_up=True)
    c.decide(OPTIONS.gone_s())
    assert c.job.reason == f"generation 2: node b has not been heard of for {OPTIONS.gone_s():g} s; 4 ranks go on"


def test_where_eight_steps_take_long_nobody_is_given_up_before():
    """Its daemon ends its ranks that much later, too."""
    c = Cluster("abc")
    c.says("a", patience_s=160.0)
    for name in "bc":
        c.says(name, patience_s=80.0)
    c.says("a")
    assert c.job.patience_s == 160.0, "it never gets less: some daemon may not have heard of that"
    c.views["b"] = replace(c.views["b"], connected=False, heard_clock=c.now, hung_up=True)
    gone_s = OPTIONS.gone_s(160.0)
    assert gone_s == 1.05 * (OPTIONS.fence_s + 160.0)
    c.decide(gone_s - 0.1)
    assert c.job.generation == 1 and c.wake() == pytest.approx(c.now + 0.1)
    c.job = replace(c.job, cancel_reason="enough")
    assert c.decide().state is JobState.STOPPING
    for name in "ac":
        c.says(name, phase=Phase.STOPPED)
    assert c.decide(0.05).state is JobState.STOPPING, "its ranks may run"
    assert c.decide(0.1).state is JobState.CANCELLED


@pytest.mark.parametrize("patience_s", [0.0, 20.0])
@pytest.mark.parametrize("who", ["is not in the generation", "is suspended", "waits"])
def test_nobody_watches(who, patience_s):
    """Then the lease counts, or eight steps where these take longer."""
    c = Cluster("abc")
    c.says("a", patience_s=patience_s)
    if who == "is not in the generation":
        c.job = replace(c.job, hosts=tuple(replace(host, entered=0) for host in c.job.hosts))
    elif who == "is suspended":
        for name in "ac":
            c.says(name, suspended="the connection broke")
    elif who == "waits":
        c.job = replace(c.job, paused=True)
        c.decide()
        assert c.job.plan.holds
    c.views["b"] = replace(c.views["b"], connected=False, heard_clock=c.now)
    c.there("d")
    limit_s = max(OPTIONS.lease_s, patience_s)
    assert not find(c.job, c.views, c.now + limit_s - 0.1, OPTIONS).lost
    assert "b" in find(c.job, c.views, c.now + limit_s, OPTIONS).lost


@pytest.mark.parametrize("paused", [False, True])
def test_nobody_gives_up_all_who_hold_the_state_before_their_ranks_have_ended(paused):
    """A daemon that was killed and starts slowly comes back to its ranks: nobody else could go on with the job."""
    c = Cluster("ab")
    c.job = replace(c.job, paused=paused)
    c.decide()
    for name in "ab":
        c.views[name] = replace(c.views[name], connected=False, heard_clock=c.now)
    c.there("d")
    gone_s = OPTIONS.gone_s(0.0)
    assert not find(c.job, c.views, c.now + gone_s - 0.1, OPTIONS).lost
    assert set(find(c.job, c.views, c.now + gone_s, OPTIONS).lost) == {"a", "b"}


def test_a_planned_change_takes_no_time_from_the_hosts_of_before():
    """It comes after their step, and that may be long."""
    c = Cluster("abc", most=3)
    c.views["c"] = replace(c.views["c"], asked_to_drain=True)
    c.decide()
    assert c.job.plan is Plan.PLANNED and c.job.generation == 2
    c.views["b"] = replace(c.views["b"], connected=False, heard_clock=c.now)
    assert not find(c.job, c.views, c.now + OPTIONS.lease_s, OPTIONS).lost
    c.says("a", entered=2)
    assert "b" in find(c.job, c.views, c.now + OPTIONS.lease_s, OPTIONS).lost
