"""Commit of units when members are lost: every order of events of three members and two units is tried."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from bagua.torch_api.comm.commit.ledger import Ledger, Progress, read

SCOPE = 7
UNITS = 2  # with results; a last one without any is that in which members leave together
MEMBERS = 3


class Call(NamedTuple):
    """An operation, as members of a generation compare it: they must call the same ones in the same order."""

    kind: str
    unit: int = 0


WORK, FLAGS, TELL = "work", "flags", "tell"
LedgerKey = tuple[tuple[tuple[int, tuple[int, int]], ...], tuple[tuple[int, int], ...]]


class Generation(NamedTuple):
    """``called``: how many operations each member has called. ``told``: progress that members brought along."""

    members: frozenset[int]
    suspended: bool = False
    calls: tuple[Call, ...] = ()
    called: tuple[int, ...] = (0,) * MEMBERS
    told: tuple[tuple[int, bytes], ...] = ()

    def over(self, number):
        """Whether all members have called this operation: then each may see its end, at any time."""
        return all(self.called[member] > number for member in self.members)


class Member(NamedTuple):
    """``at``: "work", "flags" or "tell" with ``waits`` or before the call; "between" generations, "left", "dead".
    ``whole``: the newest unit whose results its daemon has put in its memory, whether it has looked or not."""

    generation: int = 0
    at: str = WORK
    waits: bool = False
    unit: int = 1
    results: tuple[tuple[int, frozenset[int]], ...] = ()  # of each committed unit: generation, who had a part
    made_in: int = -1  # generation of the unit's results
    whole: int = 0
    ledger: LedgerKey = ((), ())


class World(NamedTuple):
    """``early``: members that call the flags when they have called the work, not when it is over."""

    members: tuple[Member, ...]
    generations: tuple[Generation, ...]
    faults: int
    early: frozenset[int] = frozenset()
    fenced: bool = True


def thaw(frozen):
    ledger = Ledger()
    ledger._mine, ledger._heard = dict(frozen[0]), dict(frozen[1])
    return ledger


def freeze(ledger):
    return tuple(sorted(ledger._mine.items())), tuple(sorted(ledger._heard.items()))


def with_member(world, number, **changes):
    members = list(world.members)
    members[number] = members[number]._replace(**changes)
    return world._replace(members=tuple(members))


def with_generation(world, number, **changes):
    generations = list(world.generations)
    generations[number] = generations[number]._replace(**changes)
    return world._replace(generations=tuple(generations))


def call(world, number):
    """A member calls its next operation; others must have called the same at this place."""
    member = world.members[number]
    generation = world.generations[member.generation]
    mine = Call(member.at, 0 if member.at == TELL else member.unit)
    place = generation.called[number]
    assert place >= len(generation.calls) or generation.calls[place] == mine, (generation.calls[place], mine)
    calls = (*generation.calls, mine) if place == len(generation.calls) else generation.calls
    called = tuple(count + (one == number) for one, count in enumerate(generation.called))
    told = generation.told
    world = with_member(world, number, waits=True)
    if member.at == WORK and number in world.early:
        world = with_generation(world, member.generation, calls=calls, called=called)
        return call(with_member(world, number, at=FLAGS, waits=False), number)
    if member.at == TELL:
        told = (*told, (number, thaw(member.ledger).tell()))
    return with_generation(world, member.generation, calls=calls, called=called, told=told)


def see_end(world, number):
    """The operation that a member waits for is over, and well."""
    member = world.members[number]
    if member.at == WORK:
        return ready(with_member(world, number, at=FLAGS, waits=False, whole=member.unit), number)
    if member.at == FLAGS:
        if number in world.early and member.unit <= UNITS:
            world = ready(world, number)
        return committed(world, number)
    ledger = thaw(member.ledger)
    ledger.hear(told for _, told in world.generations[member.generation].told)
    if ledger.must_commit(SCOPE):
        return committed(with_member(world, number, waits=False, ledger=freeze(ledger)), number)
    ledger.set_unready(SCOPE)
    return with_member(world, number, waits=False, at=first_call(member.unit), ledger=freeze(ledger))


def ready(world, number):
    """The member has seen that the unit's results are whole."""
    member = world.members[number]
    ledger = thaw(member.ledger)
    ledger.set_ready(SCOPE)
    return with_member(world, number, made_in=member.generation, ledger=freeze(ledger))


def ends(world, number):
    """Whether the operation that a member waits for may end well. Flags are fenced: each host begins them when results
    are whole there."""
    member = world.members[number]
    generation = world.generations[member.generation]
    if not generation.over(generation.called[number] - 1):
        return False
    if member.at != FLAGS or member.unit > UNITS:
        return True
    return not world.fenced or all(world.members[one].whole >= member.unit for one in generation.members)


def becomes_whole(world, number):
    """Whether the work of a member that has called the flags early may end."""
    member = world.members[number]
    generation = world.generations[member.generation]
    waits = (member.at == FLAGS and member.waits) or member.at == "dead"
    if number not in world.early or not waits or member.whole >= member.unit or member.unit > UNITS:
        return False
    place = generation.called[number] - 2
    return place >= 0 and generation.calls[place] == Call(WORK, member.unit) and generation.over(place)


def first_call(unit):
    return WORK if unit <= UNITS else FLAGS


def committed(world, number):
    member = world.members[number]
    made = (member.made_in, world.generations[member.made_in].members) if member.unit <= UNITS else (-1, frozenset())
    following = member.unit + 1
    at = "left" if following > UNITS + 1 else first_call(following)
    results = (*member.results, made)
    ledger = thaw(member.ledger)
    ledger.commit(SCOPE)
    if at == FLAGS:  # nothing to compute: ready at once
        ledger.set_ready(SCOPE)
    changes = {"results": results, "unit": following, "at": at, "waits": False, "ledger": freeze(ledger)}
    world = with_member(world, number, **changes)
    newest = len(world.generations) - 1
    if at == "left" and member.generation < newest and number in world.generations[newest].members:
        return with_generation(world, newest, suspended=True)  # its engine saw it leave a generation that it never met
    return world


def successors(world):
    """(whether it is a fault, the world after one event)"""
    newest = len(world.generations) - 1
    for number, member in enumerate(world.members):
        if becomes_whole(world, number):
            yield False, with_member(world, number, whole=member.unit)
        if member.at in ("dead", "left"):
            continue
        if world.faults:
            lost = with_member(world, number, at="dead", waits=False)
            for index, generation in enumerate(lost.generations):
                if number in generation.members and index == newest:
                    lost = with_generation(lost, index, suspended=True)
            yield True, lost._replace(faults=world.faults - 1)
        generation = world.generations[member.generation]
        if member.at == "between":
            if member.generation < newest:
                yield False, with_member(world, number, generation=newest, at=TELL)
            continue
        if member.waits and ends(world, number):
            yield False, see_end(world, number)
        if generation.suspended:
            seen = world
            if member.at == FLAGS and member.waits and number in world.early and member.whole == member.unit <= UNITS:
                seen = ready(world, number)  # it waits for the work first
            yield False, with_member(seen, number, at="between", waits=False)
        elif not member.waits:
            yield False, call(world, number)
    last = world.generations[newest]
    alive = frozenset(number for number in last.members if world.members[number].at not in ("dead", "left"))
    if last.suspended and alive:
        yield False, world._replace(generations=(*world.generations, Generation(alive)))
    if world.faults and not last.suspended and alive:  # a link broke, nobody died
        yield True, with_generation(world, newest, suspended=True)._replace(faults=world.faults - 1)


EARLY = {"late": frozenset[int](), "early": frozenset(range(MEMBERS)), "early on some": frozenset({0})}


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(
    ("members", "faults"), [(2, 1), *(pytest.param(*more, marks=pytest.mark.full) for more in ((3, 1), (2, 2)))]
)
def test_survivors_commit_the_same_results_in_every_order_of_events(members, faults, early):
    search(members, faults, EARLY[early])


def test_early_flags_need_their_fence():
    """Without it a member may have committed a unit that is not whole on another one: the search finds it."""
    with pytest.raises(AssertionError):
        search(2, 1, EARLY["early"], fenced=False)


def search(members, faults, early, fenced=True):
    everyone = frozenset(range(members))
    made = (Generation(everyone, called=(0,) * members),)
    start = World(tuple(Member() for _ in everyone), made, faults, early, fenced)
    seen, work, ended, regrouped = {start}, [start], 0, 0
    while work:
        world = work.pop()
        quiet = True
        for fault, following in successors(world):
            quiet = quiet and fault
            if following not in seen:
                seen.add(following)
                work.append(following)
        results = {member.results[:UNITS] for member in world.members if member.at == "left"}
        assert len(results) <= 1, results
        if quiet:
            assert {member.at for member in world.members} <= {"left", "dead"}, world
            ended += 1
            regrouped += len(world.generations) > 1
    assert ended > 50 and regrouped > 50, (ended, regrouped)


def test_a_scope_that_ended_is_told_once_more():
    ended, behind = Ledger(), Ledger()
    for ledger in (ended, behind):
        ledger.set_ready(SCOPE)
    ended.commit(SCOPE)
    ended.end(SCOPE)
    told = [ended.tell(), behind.tell()]
    ended.hear(told)
    behind.hear(told)
    assert behind.must_commit(SCOPE) and ended.tell() == b""


def test_progress_that_is_cut_is_refused():
    ledger = Ledger()
    ledger.set_ready(SCOPE)
    assert read(ledger.tell()) == {SCOPE: Progress(1, 0)}
    with pytest.raises(ValueError, match="19 bytes of its progress"):
        read(ledger.tell()[:-1])
