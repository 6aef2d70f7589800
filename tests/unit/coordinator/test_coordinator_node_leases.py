"""For how long daemons may count on not being given up: the clock is an argument."""

import math

import pytest

from bagua.daemon.coordinator.rules.domain import CoordinatorRecord
from bagua.daemon.coordinator.rules.node_leases import NodeLeases
from bagua.daemon.coordinator.rules.options import Options
from bagua.proto import node_pb2

OUTAGE_S = 900.0
OWN = CoordinatorRecord("one", address="10.0.0.1:7670", machine="here")
OTHER = CoordinatorRecord("two", address="10.0.0.2:7670", machine="there")


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def leases(clock):
    made = NodeLeases(True, OUTAGE_S, clock)
    made.session_began("node")
    return made


def said(leases, node_id="node"):
    found = leases.grant(node_id)
    assert found is not None
    return found


def beat(leases, *others):
    leases.refreshed(leases.now(), OWN, others)
    leases.wrote(leases.now())


def test_on_sqlite_nobody_else_decides(clock):
    assert NodeLeases(False, OUTAGE_S, clock).grant("node") is None


def test_nothing_is_said_for_sure_before_the_first_beat(leases):
    assert said(leases).age_s == math.inf and said(leases).refusals_s == 0


def test_one_that_is_alone_vouches_until_a_newcomer_could_decide(leases, clock):
    """Its database is away: somebody else may come to it meanwhile, and gives nobody up before its time."""
    beat(leases)
    last, fence_s = clock.now, 60.0
    for away in (0.0, 300.0, 899.0, 1_000.0, 5_000.0):
        clock.now = last + away
        message = said(leases)
        assert message.refusals_s == max(0.0, OUTAGE_S - away)
        assert message.coordinators == ["10.0.0.1:7670"], "daemons may dial another address"
        assert message.age_s == max(0.0, away - OUTAGE_S)
        newcomer = Options(fence_s=fence_s, outage_s=OUTAGE_S, arrived_clock=last)
        assert clock.now - message.age_s + fence_s < newcomer.gone_at(last)


def test_where_others_live_time_counts_from_the_last_beat(leases, clock):
    beat(leases, OTHER)
    clock.now += 20.0
    assert said(leases) == node_pb2.LeaseGrant(
        age_s=20.0, refusals_s=OUTAGE_S - 20.0, coordinators=["10.0.0.1:7670", "10.0.0.2:7670"]
    )


def test_time_in_which_no_other_one_reaches_the_database_counts_for_nobody(leases, clock):
    beat(leases, OTHER)
    clock.now += 10.0
    leases.heard_others(clock.now, {"two": 4.0})
    assert said(leases).age_s == 6.0
    clock.now += 3.0
    leases.heard_others(clock.now - 1.0, {"two": 100.0})  # two seconds more, to the moment of the question
    assert said(leases).age_s == 7.0
    for silent in ({}, {"another": 9.0}, {"two": 0.0}):
        clock.now += 1.0
        leases.heard_others(clock.now, silent)
    assert said(leases).age_s == 10.0
    beat(leases, OTHER)
    clock.now += 5.0
    leases.heard_others(clock.now, {"two": 100.0})
    assert said(leases).age_s == 0.0, "before the beat there is nothing to forget"
    leases.refreshed(leases.now(), OWN, [OTHER])
    clock.now += 1.0
    assert said(leases).age_s == 1.0


def test_refusals_of_one_whose_address_is_not_known_can_not_be_seen(leases):
    beat(leases, CoordinatorRecord("two"))
    assert said(leases).refusals_s == 0 and not said(leases).coordinators
    beat(leases, CoordinatorRecord("two", address="127.0.0.1:7671", machine="there"))
    assert said(leases).refusals_s == 0, "the loopback of another machine"
    beat(leases, CoordinatorRecord("two", address="127.0.0.1:7671", machine="here"))
    assert said(leases).refusals_s == OUTAGE_S and "127.0.0.1:7671" in said(leases).coordinators
    beat(leases)
    assert said(leases).refusals_s == OUTAGE_S, "the other one has died"
