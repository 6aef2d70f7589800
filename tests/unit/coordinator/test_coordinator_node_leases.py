"""For how long daemons may count on not being given up: the clock is an argument."""

from __future__ import annotations

import math

import pytest

from bagua.daemon.coordinator.host.own_address import this_machine, told_address
from bagua.daemon.coordinator.rules.domain import CoordinatorRecord
from bagua.daemon.coordinator.rules.node_leases import Standing
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
def standing(clock: Clock) -> Standing:
    made = Standing(True, OUTAGE_S, clock)
    made.holds("node")
    return made


def said(standing: Standing, node_id: str = "node") -> node_pb2.Standing:
    found = standing.message(node_id)
    assert found is not None
    return found


def beat(standing: Standing, *others: CoordinatorRecord) -> None:
    standing.looked(standing.now(), OWN, others)
    standing.wrote(standing.now())


def test_on_sqlite_nobody_else_decides(clock: Clock) -> None:
    assert Standing(False, OUTAGE_S, clock).message("node") is None


def test_nothing_is_said_for_sure_before_the_first_beat(standing: Standing) -> None:
    assert said(standing).age_s == math.inf and said(standing).refusals_s == 0


def test_one_that_is_alone_vouches_until_a_newcomer_could_decide(standing: Standing, clock: Clock) -> None:
    """Its database is away: somebody else may come to it meanwhile, and gives nobody up before its time."""
    beat(standing)
    last, fence_s = clock.now, 60.0
    for away in (0.0, 300.0, 899.0, 1_000.0, 5_000.0):
        clock.now = last + away
        message = said(standing)
        assert message.refusals_s == max(0.0, OUTAGE_S - away)
        assert message.coordinators == ["10.0.0.1:7670"], "daemons may dial another address"
        assert message.age_s == max(0.0, away - OUTAGE_S)
        newcomer = Options(fence_s=fence_s, outage_s=OUTAGE_S, arrived_clock=last)
        assert clock.now - message.age_s + fence_s < newcomer.gone_at(last)


def test_where_others_live_time_counts_from_the_last_beat(standing: Standing, clock: Clock) -> None:
    beat(standing, OTHER)
    clock.now += 20.0
    assert said(standing) == node_pb2.Standing(
        age_s=20.0, refusals_s=OUTAGE_S - 20.0, coordinators=["10.0.0.1:7670", "10.0.0.2:7670"]
    )


def test_time_in_which_the_database_refuses_counts_for_nobody(standing: Standing, clock: Clock) -> None:
    """From one refusal to the next; what is before, after and between them counts."""
    beat(standing, OTHER)
    for seconds, refused in ((1.0, True), (100.0, True), (100.0, True), (2.0, False), (1.0, True), (50.0, True)):
        clock.now += seconds
        standing.failed(refused)
    clock.now += 1.0
    assert said(standing).age_s == 1.0 + 2.0 + 1.0 + 1.0
    beat(standing, OTHER)
    assert said(standing).age_s == 0.0
    clock.now += 5.0
    standing.failed(True)  # the first one since
    assert said(standing).age_s == 5.0


def test_time_in_which_no_other_one_reaches_the_database_counts_for_nobody(standing: Standing, clock: Clock) -> None:
    """They say for how long; a gap between two answers counts."""
    beat(standing, OTHER)
    clock.now += 10.0
    standing.heard_others(clock.now, {"two": 4.0})
    assert said(standing).age_s == 6.0
    clock.now += 3.0
    standing.heard_others(clock.now - 1.0, {"two": 100.0})  # two seconds more, to the moment of the question
    assert said(standing).age_s == 7.0
    for silent in ({}, {"another": 9.0}, {"two": 0.0}):
        clock.now += 1.0
        standing.heard_others(clock.now, silent)
    assert said(standing).age_s == 10.0
    beat(standing, OTHER)
    clock.now += 5.0
    standing.heard_others(clock.now, {"two": 100.0})
    assert said(standing).age_s == 0.0, "before the beat there is nothing to forget"
    standing.looked(standing.now(), OWN, [OTHER])
    clock.now += 1.0
    assert said(standing).age_s == 1.0


def test_a_newcomer_may_reach_it_all_the_same(standing: Standing, clock: Clock) -> None:
    beat(standing, OTHER)
    clock.now += OUTAGE_S + 50.0
    standing.heard_others(clock.now, {"two": OUTAGE_S + 50.0})
    assert said(standing).age_s == 50.0


def test_two_silences_are_not_counted_twice(standing: Standing, clock: Clock) -> None:
    """One by refusals, the other by what others say."""
    beat(standing, OTHER)
    standing.failed(True)
    clock.now += 10.0
    standing.heard_others(clock.now, {"two": 100.0})
    standing.failed(True)
    clock.now += 10.0
    standing.failed(True)
    standing.heard_others(clock.now, {"two": 100.0})
    assert said(standing).age_s == 0.0
    clock.now += 7.0
    assert said(standing).age_s == 7.0


def test_of_a_node_whose_session_has_ended_time_counts_from_then(standing: Standing, clock: Clock) -> None:
    """Others count from what was written, until its next session is."""
    beat(standing, OTHER)
    standing.lets_go(["node"], standing.now())
    clock.now += 20.0
    beat(standing, OTHER)
    clock.now += 5.0
    assert said(standing).age_s == 25.0 and said(standing).refusals_s == OUTAGE_S - 5.0
    standing.heard_others(clock.now, {"two": 5.0})
    assert said(standing).age_s == 20.0
    standing.lets_go(["node"], standing.now())
    assert said(standing).age_s == 20.0, "the first time counts"
    standing.holds("node")
    assert said(standing).age_s == 0.0
    assert said(standing, "unknown").age_s == math.inf and not said(standing, "unknown").refusals_s
    beat(standing)
    assert said(standing, "unknown").age_s == 0.0, "nobody else decides"


def test_refusals_of_one_whose_address_is_not_known_can_not_be_seen(standing: Standing) -> None:
    beat(standing, CoordinatorRecord("two"))
    assert said(standing).refusals_s == 0 and not said(standing).coordinators
    beat(standing, CoordinatorRecord("two", address="127.0.0.1:7671", machine="there"))
    assert said(standing).refusals_s == 0, "the loopback of another machine"
    beat(standing, CoordinatorRecord("two", address="127.0.0.1:7671", machine="here"))
    assert said(standing).refusals_s == OUTAGE_S and "127.0.0.1:7671" in said(standing).coordinators
    beat(standing)
    assert said(standing).refusals_s == OUTAGE_S, "the other one has died"


def test_the_address_that_others_are_told() -> None:
    assert told_address("127.0.0.1:7670", "127.0.0.1:0") == "127.0.0.1:7670"
    assert told_address("127.0.0.1:7670", "0.0.0.0:7670") == told_address("127.0.0.1:7670", "[::]:7670") == ""
    assert told_address("[::1]:7670", "[::1]:7670") == "[::1]:7670"
    assert told_address("localhost:7670", "localhost:7670") in ("127.0.0.1:7670", "[::1]:7670")
    assert told_address("nowhere.invalid:7670", "nowhere.invalid:7670") == ""
    assert this_machine() == this_machine() != ""
