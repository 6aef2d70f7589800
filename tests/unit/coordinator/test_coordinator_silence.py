"""Elastic jobs: nodes that are silent, or that others have lost."""

from __future__ import annotations

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


def test_a_word_to_the_coordinator_after_the_last_one_to_its_peers_costs_no_second_silence():
    """Keeper and daemon are stopped one after the other, or a heartbeat left in the last step."""
    c = Cluster("abc")
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.views["b"] = replace(c.views["b"], heard_clock=c.now - OPTIONS.silence_s + 0.3)
    c.decide()
    assert c.job.generation == 1 and c.wake() == c.now + OPTIONS.last_words_s
    assert c.decide(OPTIONS.last_words_s).generation == 2


def test_who_talks_to_another_coordinator_is_not_taken_for_silent():
    c = Cluster("abc")
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.says("b", suspended="no word from host 0", suspended_nodes=("a",))
    c.views["b"] = replace(c.views["b"], heard_clock=0.0)
    assert c.decide(1.0).generation == 2 and len(c.members()) == 3


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


@pytest.mark.parametrize("patience_s", [0.0, 320.0])
def test_without_a_fence_it_is_out_after_a_minute_or_eight_steps(patience_s: float):
    options = replace(OPTIONS, fence_s=0.0)
    c = Cluster("ab")
    c.says("a", patience_s=patience_s)
    c.views["b"] = replace(c.views["b"], connected=False, heard_clock=c.now)
    for after, lost in ((OPTIONS.lease_s, False), (options.watched_s + patience_s, True)):
        assert bool(find(c.job, c.views, c.now + after, options).lost) is lost


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


def test_long_steps_are_told_once():
    c = Cluster("ab")
    c.told.clear()
    for told in (160.0, 160.0, 20.0, 0.0, 320.0):
        c.says("b", patience_s=told)
    words = "eight steps take up to {} s on node b: so long a host may say nothing"
    assert [text for text in c.told if "eight steps" in text] == [words.format(160), words.format(320)]


def test_a_job_that_is_stopped_hears_of_no_longer_steps():
    """Its daemons are told nothing but to stop."""
    c = Cluster("ab")
    c.job = replace(c.job, cancel_reason="enough")
    c.decide()
    c.says("a", patience_s=160.0)
    assert c.job.patience_s == 0.0


@pytest.mark.parametrize("patience_s", [0.0, 20.0])
@pytest.mark.parametrize("who", ["is not in the generation", "is suspended", "waits"])
def test_nobody_watches(who: str, patience_s: float):
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
def test_nobody_gives_up_all_who_hold_the_state_before_their_ranks_have_ended(paused: bool):
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


def test_a_newcomer_that_nobody_hears_has_a_lease_however_long_steps_are():
    c = Cluster("ab", most=3)
    c.says("a", patience_s=160.0)
    c.there("c")
    c.decide()
    assert [part.node_id for part in c.job.joining] == ["c"]
    c.views["c"] = replace(c.views["c"], connected=False, heard_clock=c.now)
    assert c.decide(OPTIONS.lease_s - 0.1).joining
    assert not c.decide(0.2).joining


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
