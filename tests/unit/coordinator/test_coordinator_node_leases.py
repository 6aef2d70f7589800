"""For how long daemons may count on not being given up: the clock is an argument."""

from __future__ import annotations

import math

import pytest

from bagua.daemon.coordinator.host.other_coordinators import this_machine, told_address
from bagua.daemon.coordinator.rules.domain import CoordinatorRecord
from bagua.daemon.coordinator.rules.node_leases import NodeLeases
from bagua.daemon.coordinator.rules.options import Options
from bagua.proto import node_pb2

OUTAGE_S = 900.0
OWN = CoordinatorRecord("one", address="10.0.0.1:7670", machine="here")
OTHER = CoordinatorRecord("two", address="10.0.0.2:7670", machine="there")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> NodeLeases:
    made = NodeLeases(True, OUTAGE_S, clock)
    made.session_began("node")
    return made


def said(leases: NodeLeases, node_id: str = "node") -> node_pb2.LeaseGrant:
    found = leases.grant(node_id)
    assert found is not None
    return found


def beat(leases: NodeLeases, *others: CoordinatorRecord) -> None:
    leases.refreshed(leases.now(), OWN, others)
    leases.wrote(leases.now())


def test_on_sqlite_nobody_else_decides(clock: Clock) -> None:
    assert NodeLeases(False, OUTAGE_S, clock).grant("node") is None


def test_nothing_is_said_for_sure_before_the_first_beat(leases: NodeLeases) -> None:
    assert said(leases).age_s == math.inf and said(leases).refusals_s == 0


def test_one_that_is_alone_vouches_until_a_newcomer_could_decide(leases: NodeLeases, clock: Clock) -> None:
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


def test_where_others_live_time_counts_from_the_last_beat(leases: NodeLeases, clock: Clock) -> None:
    beat(leases, OTHER)
    clock.now += 20.0
    assert said(leases) == node_pb2.LeaseGrant(
        age_s=20.0, refusals_s=OUTAGE_S - 20.0, coordinators=["10.0.0.1:7670", "10.0.0.2:7670"]
    )


def test_time_in_which_the_database_refuses_counts_for_nobody(leases: NodeLeases, clock: Clock) -> None:
    """From one refusal to the next; what is before, after and between them counts."""
    beat(leases, OTHER)
    for seconds, refused in ((1.0, True), (100.0, True), (100.0, True), (2.0, False), (1.0, True), (50.0, True)):
        clock.now += seconds
        leases.failed(refused)
    clock.now += 1.0
    assert said(leases).age_s == 1.0 + 2.0 + 1.0 + 1.0
    beat(leases, OTHER)
    assert said(leases).age_s == 0.0
    clock.now += 5.0
    leases.failed(True)  # the first one since
    assert said(leases).age_s == 5.0


def test_time_in_which_no_other_one_reaches_the_database_counts_for_nobody(leases: NodeLeases, clock: Clock) -> None:
    """They say for how long; a gap between two answers counts."""
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


def test_a_newcomer_may_reach_it_all_the_same(leases: NodeLeases, clock: Clock) -> None:
    beat(leases, OTHER)
    clock.now += OUTAGE_S + 50.0
    leases.heard_others(clock.now, {"two": OUTAGE_S + 50.0})
    assert said(leases).age_s == 50.0


def test_two_silences_are_not_counted_twice(leases: NodeLeases, clock: Clock) -> None:
    """One by refusals, the other by what others say."""
    beat(leases, OTHER)
    leases.failed(True)
    clock.now += 10.0
    leases.heard_others(clock.now, {"two": 100.0})
    leases.failed(True)
    clock.now += 10.0
    leases.failed(True)
    leases.heard_others(clock.now, {"two": 100.0})
    assert said(leases).age_s == 0.0
    clock.now += 7.0
    assert said(leases).age_s == 7.0


def test_of_a_node_whose_session_has_ended_time_counts_from_then(leases: NodeLeases, clock: Clock) -> None:
    """Others count from what was written, until its next session is."""
    beat(leases, OTHER)
    leases.sessions_ended(["node"], leases.now())
    clock.now += 20.0
    beat(leases, OTHER)
    clock.now += 5.0
    assert said(leases).age_s == 25.0 and said(leases).refusals_s == OUTAGE_S - 5.0
    leases.heard_others(clock.now, {"two": 5.0})
    assert said(leases).age_s == 20.0
    leases.sessions_ended(["node"], leases.now())
    assert said(leases).age_s == 20.0, "the first time counts"
    leases.session_began("node")
    assert said(leases).age_s == 0.0
    assert said(leases, "unknown").age_s == math.inf and not said(leases, "unknown").refusals_s
    beat(leases)
    assert said(leases, "unknown").age_s == 0.0, "nobody else decides"


def test_refusals_of_one_whose_address_is_not_known_can_not_be_seen(leases: NodeLeases) -> None:
    beat(leases, CoordinatorRecord("two"))
    assert said(leases).refusals_s == 0 and not said(leases).coordinators
    beat(leases, CoordinatorRecord("two", address="127.0.0.1:7671", machine="there"))
    assert said(leases).refusals_s == 0, "the loopback of another machine"
    beat(leases, CoordinatorRecord("two", address="127.0.0.1:7671", machine="here"))
    assert said(leases).refusals_s == OUTAGE_S and "127.0.0.1:7671" in said(leases).coordinators
    beat(leases)
    assert said(leases).refusals_s == OUTAGE_S, "the other one has died"


def test_the_address_that_others_are_told() -> None:
    assert told_address("127.0.0.1:7670", "127.0.0.1:0") == "127.0.0.1:7670"
    assert told_address("127.0.0.1:7670", "0.0.0.0:7670") == told_address("127.0.0.1:7670", "[::]:7670") == ""
    assert told_address("[::1]:7670", "[::1]:7670") == "[::1]:7670"
    assert told_address("localhost:7670", "localhost:7670") in ("127.0.0.1:7670", "[::1]:7670")
    assert told_address("nowhere.invalid:7670", "nowhere.invalid:7670") == ""
    assert this_machine() == this_machine() != ""
