"""Elastic jobs: nodes that are silent, or that others have lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rig.elastic_job import OPTIONS, Cluster


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
