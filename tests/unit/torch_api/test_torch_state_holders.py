"""Newcomers are let in between two steps, by all or by none: every order of events of three members is tried."""

from __future__ import annotations

import pytest

from bagua.torch_api.comm.state_holders import Outcome, Standing, is_whole, settle

WHOLE, NEW = Standing(True, True, 3), Standing(False, True, 0)


def test_all_wait_between_steps():
    assert settle({0: WHOLE, 1: WHOLE, 2: NEW}) == Outcome(frozenset([2]), True, 3)
    assert settle({0: WHOLE, 1: WHOLE}) == Outcome(frozenset(), False, 3)


def test_somebody_is_in_a_step():
    """Newcomers wait until the furthest lap is over everywhere."""
    busy = WHOLE._replace(between=False, laps=4)
    assert settle({0: WHOLE, 1: busy, 2: NEW}) == Outcome(frozenset([2]), False, 4)


def test_one_has_let_them_in():
    """The others, newcomers among them, held all of the state, and do so, too."""
    everyone = {
        0: WHOLE._replace(ready=5, let_in=5, between=False),
        1: WHOLE._replace(ready=5),
        2: NEW._replace(ready=5),
    }
    assert is_whole(everyone[2], everyone)
    assert settle(everyone).newcomers == frozenset()
    assert not is_whole(NEW._replace(ready=4), everyone)


def test_nobody_is_left_who_holds_the_state():
    with pytest.raises(ValueError, match=r"None of the members \[2, 3\] holds the state"):
        settle({2: NEW, 3: NEW._replace(ready=2)})


# Two members with state, and a newcomer. Each event is a call of one of them; a loss, or a broken link, may come at any
# moment: then those that are left tell each other where they stand, in a new generation.
