"""Newcomers are let in between two steps, by all or by none: every order of events of three members is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from bagua.torch_api.comm.state_holders import Outcome, Standing, is_whole, settle

WHOLE, NEW = Standing(True, True, 3), Standing(False, True, 0)


def test_all_wait_between_steps() -> None:
    assert settle({0: WHOLE, 1: WHOLE, 2: NEW}) == Outcome(frozenset([2]), True, 3)
    assert settle({0: WHOLE, 1: WHOLE}) == Outcome(frozenset(), False, 3)


def test_somebody_is_in_a_step() -> None:
    """Newcomers wait until the furthest lap is over everywhere."""
    busy = WHOLE._replace(between=False, laps=4)
    assert settle({0: WHOLE, 1: busy, 2: NEW}) == Outcome(frozenset([2]), False, 4)


def test_one_has_let_them_in() -> None:
    """The others, newcomers among them, held all of the state, and do so, too."""
    everyone = {
        0: WHOLE._replace(ready=5, let_in=5, between=False),
        1: WHOLE._replace(ready=5),
        2: NEW._replace(ready=5),
    }
    assert is_whole(everyone[2], everyone)
    assert settle(everyone).newcomers == frozenset()
    assert not is_whole(NEW._replace(ready=4), everyone)


def test_nobody_is_left_who_holds_the_state() -> None:
    with pytest.raises(ValueError, match=r"None of the members \[2, 3\] holds the state"):
        settle({2: NEW, 3: NEW._replace(ready=2)})


# Two members with state, and a newcomer. Each event is a call of one of them; a loss, or a broken link, may come at any
# moment: then those that are left tell each other where they stand, in a new generation.

LAPS = 3


@dataclass(frozen=True)
class Member:
    """``at``: "working" (in a step), "between", "copied" (ready, waits for the others), "dead". ``lap``: what its state
    is; -1: none."""

    standing: Standing
    at: str
    lap: int


@dataclass(frozen=True)
class World:
    """``outcome`` of the present generation."""

    members: tuple[Member, ...]
    generation: int
    faults: int
    outcome: Outcome | None


def living(world: World) -> list[int]:
    return [number for number, member in enumerate(world.members) if member.at != "dead"]


def change(world: World, number: int, **changes: object) -> World:
    members = list(world.members)
    standing = changes.pop("standing", members[number].standing)
    members[number] = replace(members[number], standing=standing, **changes)  # type: ignore[arg-type]
    return replace(world, members=tuple(members))


def enter(world: World) -> World | None:
    """Those that are left enter the next generation, and hear each other."""
    everyone = {number: world.members[number].standing for number in living(world)}
    try:
        outcome = settle(everyone)
    except ValueError:
        return None
    generation = world.generation + 1
    world = replace(world, generation=generation, outcome=outcome)
    for number in everyone:
        member, whole = world.members[number], number not in outcome.newcomers
        at = member.at
        if at == "copied":
            at = "between"
        standing = member.standing._replace(whole=whole, between=at == "between")
        if whole and not member.standing.whole:
            assert member.lap >= 0
        world = change(world, number, standing=standing, at=at)
    return world


def successors(world: World) -> Iterator[World]:
    alive, outcome = living(world), world.outcome
    for number in alive:
        member = world.members[number]
        others = [world.members[other] for other in alive if other != number]
        laps = member.standing.laps
        if member.standing.whole and member.at == "working":
            # A step ends with all that have state.
            if all(one.standing.laps >= laps for one in others if one.standing.whole):
                standing = member.standing._replace(between=True)
                yield change(world, number, at="between", lap=laps, standing=standing)
        elif member.standing.whole and member.at == "between" and not waits(world, number):
            if laps < LAPS:
                standing = member.standing._replace(between=False, laps=laps + 1)
                yield change(world, number, at="working", standing=standing)
        elif member.at == "between" and outcome is not None and outcome.newcomers:
            everyone = [world.members[other] for other in alive]
            if all(one.at in ("between", "copied") for one in everyone):
                yield from copy(world, number, alive)
        if member.at == "copied" and all(
            other.at == "copied" or other.standing.let_in == world.generation for other in others
        ):
            standing = member.standing._replace(whole=True, let_in=world.generation)
            yield change(world, number, at="between", standing=standing)
    if world.faults:
        for gone in (None, *alive):
            lost = world if gone is None else change(world, gone, at="dead")
            if living(lost):
                entered = enter(replace(lost, faults=world.faults - 1))
                if entered is not None:
                    yield entered


def waits(world: World, number: int) -> bool:
    outcome, standing = world.outcome, world.members[number].standing
    if outcome is None or not outcome.newcomers or standing.let_in == world.generation:
        return False
    return outcome.copies or standing.laps >= outcome.lap


def copy(world: World, number: int, alive: list[int]) -> Iterator[World]:
    """State of this member is where it is to be: from one with state that is there, too."""
    whole = [world.members[other] for other in alive if world.members[other].standing.whole]
    if not all(waits(world, other) for other in alive if world.members[other].standing.whole):
        return
    laps = {one.standing.laps for one in whole}
    assert len(laps) == 1 and len({one.lap for one in whole}) == 1, "copied from members after different steps"
    standing = world.members[number].standing._replace(laps=laps.pop(), ready=world.generation)
    yield change(world, number, at="copied", lap=whole[0].lap, standing=standing)


@pytest.mark.parametrize("faults", [1, pytest.param(2, marks=pytest.mark.full)])
def test_newcomers_are_let_in_by_all_or_none_in_every_order_of_events(faults: int) -> None:
    start = Member(Standing(True, True, 0), "between", 0)
    first = World((start, start, Member(NEW, "between", -1)), 1, faults, None)
    seen: set[World] = set()
    ends = joined = 0
    work = [first, *filter(None, [enter(first)])]
    while work:
        world = work.pop()
        if world in seen:
            continue
        seen.add(world)
        following = list(successors(world))
        quiet = [one for one in following if one.faults == world.faults and one.generation == world.generation]
        if not quiet:
            ends += 1
            left = [world.members[number] for number in living(world)]
            if world.outcome is not None:
                assert all(one.standing.whole and one.standing.laps == LAPS for one in left), world
                joined += len(left) == 3
        work += following
    assert ends > 20 and joined > 3, (ends, joined)
