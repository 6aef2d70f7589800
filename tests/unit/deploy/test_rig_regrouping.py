"""The stand-in for a coordinator in tests of elastic jobs: no order of what engines tell leaves their ranks without a
next generation."""

from __future__ import annotations

from typing import Any

import pytest
from rig.ranks.regrouping import Regrouper


class Engine:
    """Notes the generations that it is told, by their number."""

    def __init__(self) -> None:
        self.at_once: dict[int, list[int]] = {}
        self.planned: dict[int, list[int]] = {}

    def address(self) -> str:
        return "127.0.0.1:1"

    def set_peers(self, addresses: list[str]) -> None:
        assert addresses

    def regroup(self, generation: int, members: list[int], **_: Any) -> None:
        self.at_once[generation] = members

    def plan(self, generation: int, members: list[int], **_: Any) -> None:
        self.planned[generation] = members


def job(hosts: list[list[int]], joining: dict[int, list[int]]) -> tuple[Regrouper, list[Engine]]:
    """One whose newcomers are ready."""
    regrouper = Regrouper(hosts)
    engines = [Engine() for _ in hosts]
    regrouper.engines = dict(enumerate(engines))
    regrouper.joining = joining
    for index, members in joining.items():
        for member in members:
            regrouper.take(index, {"kind": "ready_to_join", "rank": member})
    return regrouper, engines


def lost(member: int) -> dict[str, Any]:
    return {"kind": "lost", "rank": member}


def suspended(generation: int, member: int) -> dict[str, Any]:
    return {"kind": "suspended", "rank": member, "generation": generation}


def regrouped(generation: int) -> dict[str, Any]:
    return {"kind": "regrouped", "rank": -1, "generation": generation}


@pytest.mark.parametrize("told", [-1, 0, 1, 2], ids=lambda at: f"regrouped told at {at}")
def test_a_newcomer_ends_as_soon_as_it_has_entered(told: int) -> None:
    """Its end may be told before the beginning of the generation."""
    regrouper, engines = job([[0, 1]], {0: [2]})
    events = [lost(2), suspended(2, 2)]
    if told >= 0:
        events.insert(told, regrouped(2))
    for event in events:
        regrouper.take(0, event)
    assert engines[0].planned == {2: [0, 1, 2]} and engines[0].at_once == {3: [0, 1]}


def test_it_ends_before_another_host_has_told_anything() -> None:
    """The other newcomer has entered, too: it stays."""
    regrouper, engines = job([[0], [1]], {1: [2, 3]})
    for index, event in ((1, regrouped(2)), (1, lost(2)), (1, suspended(2, 2)), (0, regrouped(2))):
        regrouper.take(index, event)
    assert all(engine.at_once == {3: [0, 1, 3]} and list(engine.planned) == [2] for engine in engines)


def test_newcomers_stay_outside_where_a_member_is_lost_before_the_plan_begins() -> None:
    regrouper, engines = job([[0, 1]], {0: [2]})
    for event in (lost(1), suspended(1, 1)):
        regrouper.take(0, event)
    assert engines[0].at_once == {3: [0]} and engines[0].planned == {2: [0, 1, 2], 4: [0, 2]}


def test_a_loss_that_two_hosts_tell_is_one() -> None:
    regrouper, engines = job([[0, 1], [2]], {})
    for index, event in ((0, lost(1)), (0, suspended(1, 1)), (1, suspended(1, 1))):
        regrouper.take(index, event)
    assert engines[1].at_once == {2: [0, 2]}
