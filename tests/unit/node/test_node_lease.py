"""When a node's lease ends: the clock is an argument."""

import math

import pytest

from bagua.base.machine_clock import STANDSTILL_S, Standstill
from bagua.daemon.node.session.lease import Lease
from bagua.proto import node_pb2


def welcome(fence_s=60.0, sole=False):
    return node_pb2.Welcome(heartbeat_s=2.0, lease_s=10.0, fence_s=fence_s, sole=sole)


@pytest.fixture
def changes():
    return []


@pytest.fixture
def lease(changes):
    return Lease(lambda: changes.append(1))


def test_nothing_is_fenced_before_a_welcome(lease):
    lease.hello(100.0)
    lease.refused(100.0)
    assert lease.deadline() == math.inf and lease.beat(1e9) == 0


@pytest.mark.parametrize("fence_s", [0.0, -1.0, math.nan, math.inf])
def test_a_coordinator_without_fences(lease, fence_s):
    lease.hello(100.0)
    lease.welcome(welcome(fence_s, sole=True))
    assert lease.deadline() == math.inf and not lease.asks(1e9) and lease.beat(1e9) == 0


def test_the_moment_of_sending_counts(lease, changes):
    lease.hello(100.0)
    lease.welcome(welcome())
    assert lease.deadline() == 160.0 and changes == [1]
    assert lease.beat(104.9) == 0  # half of the lease has not passed yet
    assert [lease.beat(at) for at in (105.0, 107.0, 109.0)] == [1, 2, 3]
    lease.acknowledged(2)
    assert lease.deadline() == 167.0
    lease.acknowledged(1)  # out of order, and never sent
    lease.acknowledged(99)
    assert lease.deadline() == 167.0
    lease.acknowledged(3)
    assert lease.deadline() == 169.0 and lease.beat(113.9) == 0 and lease.beat(114.0) == 4


def test_acknowledgements_of_an_older_stream_do_not_count(lease):
    lease.hello(100.0)
    lease.welcome(welcome())
    assert lease.beat(110.0) == 1
    lease.hello(120.0)
    lease.acknowledged(1)
    assert lease.deadline() == 160.0  # no Welcome yet
    lease.welcome(welcome(30.0))
    assert lease.deadline() == 150.0 and lease.fence_s == 30.0


def test_refusals_count_where_nobody_else_decides(lease):
    lease.hello(100.0)
    lease.welcome(welcome(sole=False))
    lease.refused(150.0)
    assert lease.deadline() == 160.0
    lease.hello(155.0)
    lease.welcome(welcome(sole=True))
    lease.refused(200.0)
    assert lease.deadline() == 260.0
    lease.refused(190.0)  # never backwards
    assert lease.deadline() == 260.0


def test_a_coordinator_that_may_not_be_alone_says_for_how_long_refusals_count(lease):
    lease.hello(100.0)
    told = welcome()
    told.grant.MergeFrom(node_pb2.LeaseGrant(age_s=4.0, refusals_s=50.0, coordinators=["10.0.0.2:7670"]))
    lease.welcome(told)
    assert lease.deadline() == 156.0 and lease.coordinators == ("10.0.0.2:7670",), "others count from its last beat"
    lease.refused(149.0)
    assert lease.deadline() == 209.0 and lease.asks(149.9) and not lease.asks(150.0)
    lease.refused(150.0)
    assert lease.deadline() == 209.0
    assert lease.beat(200.0) == 1
    lease.acknowledged(1, node_pb2.LeaseGrant(age_s=30.0))
    assert lease.deadline() == 230.0 and not lease.asks(200.0) and lease.coordinators == ()


def test_a_standstill_is_noticed_once():
    standstill = Standstill()
    assert not standstill.look(1e9)  # nothing was expected
    standstill.expect(100.0)
    assert not standstill.look(100.0 + STANDSTILL_S)  # a slow machine
    assert standstill.look(200.0) and standstill.woke == 200.0
    assert not standstill.look(300.0) and standstill.woke == 200.0


def test_what_was_answered_since(lease, changes):
    lease.hello(100.0)
    lease.welcome(welcome())
    lease.standstill.expect(101.0)
    changes.clear()
    assert lease.beat(200.0) == 1 and changes == [1], "the standstill is told before anything is sent"
    assert lease.answered < 0
    lease.acknowledged(1, welcomed=False)
    assert lease.answered < 0 and lease.deadline() == 260.0
    assert lease.beat(206.0) == 2
    lease.acknowledged(2)
    assert lease.answered == 206.0
    lease.hello(300.0)
    assert lease.answered < 0, "another coordinator may have answered"
