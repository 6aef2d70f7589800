"""Newcomers and losses together: every order of events of two members and a newcomer is tried, in jobs of two units.

Members follow ``commit/retry.py``, with the real ``Ledger`` and ``settle``. Each is on a host of its own. A generation
that is planned begins at a member when that waits between two units; one that follows a loss, at once.
"""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest

from bagua.torch_api.comm.commit.ledger import Ledger
from bagua.torch_api.comm.state_holders import Standing, is_whole, settle

SCOPE = 7
MEMBERS, NEWCOMER = (0, 1), 2
WORK, FLAGS, TELL, COPY, LET_IN = "work", "flags", "tell", "copy", "let in"
OVER, BOUNDARY, LOBBY = "over", "boundary", "lobby"  # of its generation; waits for a planned one; is not in any yet
ENDED = ("left", "dead", "out")
LedgerKey = tuple[tuple[tuple[int, tuple[int, int]], ...], tuple[tuple[int, int], ...]]


@pytest.fixture(autouse=True)
def no_collection():
    """Worlds are no garbage, and looking for it took a third of the time."""
    gc.disable()
    yield
    gc.enable()


class Called(NamedTuple):
    """An operation that members of a generation have called: what each has told with it."""

    kind: str
    unit: int
    told: tuple[tuple[int, object], ...] = ()


EVERYBODY, ACTIVE, ALL_ACTIVE = range(3)
"""Groups with an order of operations of their own: the generation; those that train while newcomers rest; and all that
train where none rests."""


class Generation(NamedTuple):
    """``calls``: by group."""

    members: frozenset[int]
    planned: bool = False
    suspended: bool = False
    entered: bool = False
    calls: tuple[tuple[Called, ...], ...] = ((), (), ())

    def of(self, group):
        return self.members - {NEWCOMER} if group == ACTIVE else self.members


class Member(NamedTuple):
    """``calls``: operations that it has called in its generation, by group; it waits for the last one if ``waits``.
    ``lap``: see ``Outcome``; -1: no newcomer rests. ``rows``: progress of those that hold the state, told with the last
    roll call."""

    generation: int = 0
    at: str = WORK
    waits: bool = False
    calls: tuple[int, ...] = (0, 0, 0)
    unit: int = 1
    results: tuple[tuple[int, frozenset[int]], ...] = ()
    made_in: int = -1
    ledger: LedgerKey = ((), ())
    standing: Standing = Standing(True, False, 0)
    planned: int = 0
    lap: int = -1
    rows: tuple[bytes, ...] = ()

    @property
    def group(self):
        """Of its next operation, or that which it waits for."""
        if self.at in (TELL, COPY):
            return EVERYBODY
        return ALL_ACTIVE if self.lap < 0 or self.at == LET_IN else ACTIVE


class World(NamedTuple):
    members: tuple[Member, ...]
    generations: tuple[Generation, ...]
    faults: int
    units: int
    plan: int = 0  # number of the planned generation; 0: none yet
    knows: frozenset[int] = frozenset()  # members whose host has heard of it
    repeats: bool = False  # a unit was exchanged again


def thaw(frozen):
    ledger = Ledger()
    ledger._mine, ledger._heard = dict(frozen[0]), dict(frozen[1])
    return ledger


def freeze(ledger):
    return tuple(sorted(ledger._mine.items())), tuple(sorted(ledger._heard.items()))


def put(world, number, member):
    members = list(world.members)
    members[number] = member
    return world._replace(members=tuple(members))


def put_generation(world, number, **changes):
    generations = list(world.generations)
    generations[number] = generations[number]._replace(**changes)
    return world._replace(generations=tuple(generations))


def call(world, number):
    """A member calls its next operation; others must have called the same at this place."""
    member = world.members[number]
    generation = world.generations[member.generation]
    unit = member.unit if member.at in (WORK, FLAGS) else 0
    told = None
    if member.at == FLAGS:
        told = max(member.planned, world.plan if number in world.knows else 0)
    elif member.at == TELL:
        told = (member.standing, thaw(member.ledger).tell() if member.standing.whole else b"")
    group = member.group
    calls, place = list(generation.calls[group]), member.calls[group]
    if place == len(calls):
        calls.append(Called(member.at, unit))
    assert calls[place][:2] == (member.at, unit), (calls[place], member)
    everyone = tuple(sorted((*calls[place].told, (number, told)), key=lambda one: one[0]))
    calls[place] = calls[place]._replace(told=everyone)
    world = put(world, number, member._replace(waits=True, calls=changed(member.calls, group, place + 1)))
    return put_generation(world, member.generation, calls=changed(generation.calls, group, tuple(calls)))


def changed(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def is_over(world, member):
    """The operation that it waits for, if all members have called it: then it may see the end, at any time."""
    generation = world.generations[member.generation]
    last = generation.calls[member.group][member.calls[member.group] - 1]
    return last if len(last.told) == len(generation.of(member.group)) else None


def see_end(world, number, last):
    member = world.members[number]._replace(waits=False)
    ledger = thaw(member.ledger)
    if last.kind == WORK:
        ledger.set_ready(SCOPE)
        ready = member._replace(at=FLAGS, made_in=member.generation, ledger=freeze(ledger))
        return put(world, number, ready)
    if last.kind == FLAGS:
        planned = max(told for _, told in last.told)
        return commit(world, number, member._replace(planned=planned))
    if last.kind == TELL:
        return hear(world, number, member, last)
    present = member.standing._replace(laps=member.lap)
    if last.kind == COPY:
        if not member.standing.whole:  # it gets what the others have
            others = {world.members[one][4:6] for one in MEMBERS if has_state_there(world, one, member.generation)}
            if others:
                ((unit, results),) = others
                member = member._replace(unit=unit, results=results)
        present = present._replace(ready=member.generation + 1)
        return put(world, number, member._replace(at=LET_IN, standing=present))
    member = member._replace(standing=member.standing._replace(let_in=member.generation + 1), lap=-1)
    return go_on(world, number, member if member.standing.whole else come_in(member))


def has_state_there(world, number, generation):
    """Whether it gives its state in the copy of that generation, at whose end it is, or was, and made no step since."""
    member = world.members[number]
    return member.generation == generation and member.at in (COPY, LET_IN)


def hear(world, number, member, last):
    """All have told where they stand: ``Units._hear``."""
    rows = dict(last.told)
    everyone = {one: row[0] for one, row in rows.items()}
    outcome = settle(everyone)
    whole = tuple(rows[one][1] for one in rows if one not in outcome.newcomers)
    member = member._replace(rows=whole)
    if not member.standing.whole and is_whole(member.standing, everyone):
        member = come_in(member)
    ledger = thaw(member.ledger)
    ledger.hear(whole)
    member = member._replace(ledger=freeze(ledger), lap=outcome.lap if outcome.newcomers else -1)
    if outcome.copies:
        return put(world, number, member._replace(at=COPY))
    due = member.standing.between and (not member.standing.whole or member.standing.laps >= member.lap)
    if member.lap >= 0 and due:
        return put(world, number, member._replace(at=TELL))
    return go_on(world, number, member)


def come_in(member):
    ledger = Ledger()
    ledger.begin_with(member.rows)
    return member._replace(ledger=freeze(ledger), standing=member.standing._replace(whole=True))


def go_on(world, number, member):
    """It is on common ground with the others of its generation."""
    if member.standing.between:
        after = member.standing._replace(between=False, laps=member.standing.laps + 1)
        return begin_unit(world, number, member._replace(standing=after))
    ledger = thaw(member.ledger)
    if ledger.must_commit(SCOPE):
        return commit(world, number, member)
    again = SCOPE in ledger._mine and ledger._mine[SCOPE][0] > ledger._mine[SCOPE][1]
    ledger.set_unready(SCOPE)
    world = world._replace(repeats=world.repeats or (again and member.unit <= world.units))
    return begin_unit(world, number, member._replace(ledger=freeze(ledger)))


def begin_unit(world, number, member):
    if member.unit <= world.units:
        return put(world, number, member._replace(at=WORK))
    ledger = thaw(member.ledger)
    ledger.set_ready(SCOPE)  # nothing to compute: members leave together
    return put(world, number, member._replace(at=FLAGS, ledger=freeze(ledger)))


def commit(world, number, member):
    ledger = thaw(member.ledger)
    ledger.commit(SCOPE)
    member = member._replace(ledger=freeze(ledger))
    if member.unit > world.units:
        world = put(world, number, member._replace(at="left"))
        for index in range(member.generation + 1, len(world.generations)):
            if number in world.generations[index].members:
                world = put_generation(world, index, suspended=True)  # others meet that it is not there
        return world
    made = (member.made_in, world.generations[member.made_in].members)
    member = member._replace(results=(*member.results, made), unit=member.unit + 1)
    lost = world.generations[member.generation].suspended
    between = member._replace(standing=member.standing._replace(between=True))
    if member.planned > member.generation:
        return put(world, number, between._replace(at=OVER if lost else BOUNDARY))
    if 0 <= member.lap <= member.standing.laps:
        return put(world, number, between._replace(at=TELL))
    laps = member.standing.laps + 1
    return begin_unit(world, number, member._replace(standing=member.standing._replace(laps=laps)))


def enter(world, number, generation):
    member = world.members[number]._replace(generation=generation, at=TELL, waits=False, calls=(0, 0, 0), lap=-1)
    return put_generation(put(world, number, member), generation, entered=True)


def lose(world, number):
    member = world.members[number]
    found = put(world, number, member._replace(at="dead", waits=False))
    for index, generation in enumerate(found.generations):
        if number in generation.members and index >= member.generation:
            found = put_generation(found, index, suspended=True)
    return found._replace(faults=found.faults - 1)


def holds_state(world, number):
    return number in MEMBERS or world.members[number].standing.whole


def react(world):
    """The coordinator's next generation, of those that are left. Newcomers are in it if the planned one has begun."""
    newest = max((index for index, one in enumerate(world.generations) if not one.planned), default=0)
    alive = [number for number, one in enumerate(world.members) if one.at not in ENDED]
    waits = [number for number in alive if world.generations[world.members[number].generation].suspended]
    if not any(world.members[number].generation >= newest and holds_state(world, number) for number in waits):
        return None
    begun = world.plan and world.generations[world.plan].entered
    if not begun and NEWCOMER in alive:
        alive.remove(NEWCOMER)
        world = put(world, NEWCOMER, world.members[NEWCOMER]._replace(at="out"))
    if not any(holds_state(world, number) for number in alive):
        return None
    for index in range(len(world.generations)):
        world = put_generation(world, index, suspended=True)
    return world._replace(generations=(*world.generations, Generation(frozenset(alive))))


def successors(world):
    """(whether it may never happen, the world after one event)"""
    last = len(world.generations) - 1
    for number, member in enumerate(world.members):
        if member.at in ENDED:
            continue
        if world.faults:
            yield True, lose(world, number)
        if world.plan and number in MEMBERS and number not in world.knows:
            yield False, world._replace(knows=world.knows | {number})
        if member.at == LOBBY:
            if world.plan:
                yield False, enter(world, number, last)
            continue
        generation = world.generations[member.generation]
        if member.at in (OVER, BOUNDARY):
            for later in range(member.generation + 1, last + 1):
                follows = world.generations[later]
                if number not in follows.members:
                    continue
                if (not follows.planned and later == last) or (follows.planned and member.at == BOUNDARY):
                    yield False, enter(world, number, later)
            continue
        if member.waits and (ended := is_over(world, member)) is not None:
            yield False, see_end(world, number, ended)
        if generation.suspended:
            yield False, put(world, number, member._replace(at=OVER, waits=False))
        elif not member.waits:
            yield False, call(world, number)
    if (following := react(world)) is not None:
        yield False, following
    if not world.plan and last == 0 and not world.generations[0].suspended:
        planned = Generation(frozenset((*MEMBERS, NEWCOMER)), planned=True)
        if all(world.members[number].at not in ENDED for number in (*MEMBERS, NEWCOMER)):
            yield True, world._replace(plan=1, generations=(*world.generations, planned))
    if world.faults and not world.generations[last].suspended:  # a link broke, nobody died
        broken = [index for index in (0, last) if not world.generations[index].suspended]
        for index in broken:
            yield True, put_generation(world, index, suspended=True)._replace(faults=world.faults - 1)


def search(units, faults):
    """(worlds, ends, ends in which the newcomer has taken part)"""
    first = Generation(frozenset(MEMBERS), entered=True)
    newcomer = Member(at=LOBBY, standing=Standing(False, True, 0))
    start = World((Member(), Member(), newcomer), (first,), faults, units)
    seen, work, ends, joined = {start}, [start], 0, 0
    while work:
        world = work.pop()
        quiet = True
        for may, following in successors(world):
            quiet = quiet and may
            before = len(seen)
            seen.add(following)  # whose hash takes longer than all else, so it is made once
            if len(seen) > before:
                work.append(following)
        results = {member.results for member in world.members if member.at == "left"}
        assert len(results) <= 1 and all(len(one) == units for one in results), results
        assert faults > world.faults or not world.repeats, "nothing is repeated where nobody is lost"
        if quiet:
            ends += 1
            joined += world.members[NEWCOMER].at == "left"
            late = world.members[NEWCOMER]
            others = {world.members[number].at for number in MEMBERS}
            assert others <= {"left", "dead"}, world
            # A newcomer that comes too late waits until its daemon ends it.
            assert late.at in ENDED or not late.standing.whole, world
    return len(seen), ends, joined


@pytest.mark.parametrize(("units", "faults"), [(2, 0), (1, 1), pytest.param(2, 1, marks=pytest.mark.full)])
def test_members_and_newcomers_commit_the_same_results_in_every_order_of_events(units, faults):
    """Each unit once, of the same generation; nobody waits for ever, and without a loss nothing is repeated."""
    _, ends, joined = search(units, faults)
    assert 0 < joined < ends


def test_a_newcomer_that_begins_with_other_numbers_is_found(monkeypatch):
    monkeypatch.setattr(Ledger, "begin_with", lambda self, told: None)
    with pytest.raises(AssertionError):
        search(1, 1)


def test_state_that_is_copied_in_the_middle_of_a_unit_is_found(monkeypatch):
    settle_well = settle

    def hasty(everyone):
        return (found := settle_well(everyone))._replace(copies=bool(found.newcomers))

    monkeypatch.setitem(globals(), "settle", hasty)
    with pytest.raises((AssertionError, ValueError)):
        search(1, 1)
