"""Clocks of nodes, and which jobs can be traced."""

from hypothesis import given
from hypothesis import strategies as st

from bagua.daemon.coordinator.rules.clock_offsets import Exchange, offset_during, offset_of

DELAYS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8)


def exchanges(true, delays, sent=0):
    """Exchanges with a node whose clock is ``true`` ns behind, with these delays of the two ways."""
    return [Exchange(sent, sent + there - true, sent + there + back) for there, back in delays]


@given(st.integers(-(10**15), 10**15), DELAYS, DELAYS)
def test_the_offset_is_within_its_bound(true, before, after):
    found = offset_during(exchanges(true, before), exchanges(true, after, 10**9))
    assert abs(found.ns - true) <= found.bound
    assert found.bound <= max(min(there + back for there, back in one) for one in (before, after)) + 2


@given(st.integers(-(10**9), 10**9), st.integers(-(10**6), 10**6), DELAYS, DELAYS)
def test_the_bound_covers_clocks_that_drift(true, drift, before, after):
    found = offset_during(exchanges(true, before), exchanges(true + drift, after, 10**9))
    assert abs(found.ns - true) <= found.bound and abs(found.ns - true - drift) <= found.bound


def test_the_quickest_exchange_counts():
    found = offset_of(exchanges(500, [(100, 9000), (10, 20), (4000, 0)]))
    assert (found.ns, found.bound) == (505, 15)
