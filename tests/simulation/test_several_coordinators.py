"""A node is given up by none of several coordinators before its lease is over, whatever they reach."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated.node_leases import EVENTS, OPTIONS, play

EVENT = st.tuples(st.sampled_from((0.3, 1.0, 4.0, 12.0, 30.0, 62.0, 100.0)), st.sampled_from(EVENTS))

BRIEF = [(0.3, "refuse"), (0.3, "restart_a"), (12.0, "restart_a"), (0.3, "refuse")]


@given(st.lists(EVENT, max_size=12))
@settings(max_examples=100, deadline=None)
@example([(30.0, "kill_b"), (0.3, "move")])  # the one that lives is not where the node dials
@example([(1.0, "move"), (12.0, "silence_b"), (12.0, "refuse"), (0.3, "refuse")])  # away for one, then for both
@example([*BRIEF, (12.0, "silence_b"), (0.3, "silence"), (0.3, "cut_a")])  # a clock is put forward in a session
@example([(30.0, "cut_a"), (0.3, "silence_b"), (4.0, "move"), (45.0, "move"), (20.0, "silence_a")])  # an end is known
def test_nobody_is_given_up_before_the_lease_is_over(events):
    play([*events, (150.0, "wait")])


def test_a_database_that_is_silent_for_all_ends_nothing():
    assert OPTIONS.fence_s < 300.0 < OPTIONS.outage_s
    assert not play([(300.0, "silence")])
    assert not play([(300.0, "silence"), (60.0, "silence")])
    assert play([(300.0, "silence_a")]), "the other one reaches it"
    assert play([(1.0, "part"), (300.0, "silence")]), "the other one may reach it"


def test_one_that_is_cut_off_ends_what_runs_there():
    assert play([(200.0, "cut_all")])
