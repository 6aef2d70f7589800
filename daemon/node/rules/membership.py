"""The transitions of elastic jobs (see transitions.py): members come and go. Pure functions.

A member of this node is in one of four groups: in the newest generation (``ranks``), preparing to join (``lobby``),
dismissed by a planned change (``leaving``), or out (``gone``). A planned generation is the newest one as soon as the
coordinator has told it; ranks go on in the one that the engine has ``entered`` until it follows.
"""

from __future__ import annotations

import math
import signal
from dataclasses import replace

from bagua.base.end_reasons import SPENT, island_words, overdue_words
from bagua.daemon.node.rules import events
from bagua.daemon.node.rules.events import Instruction
from bagua.daemon.node.rules.state import JobState, Phase, Rank, RankPhase, newcomers

LOST_S = 5.0  # how long a rank that the engine has lost may take to end by itself: the next generation waits
LEAVE_S = 60.0  # how long a rank that was dismissed may take for the rest of its program
NOT_STARTED = 127  # Exit code of a newcomer that could not be started, as of a shell

Step = tuple[JobState, list[Instruction]]


def regroup(state: JobState, event: events.Regrouped, now: float) -> Step:
    """Takes the newest word of the coordinator in: whoever stays may have another rank, newcomers are started, whoever
    is out is killed, whoever is dismissed may go."""
    after = renumber(state, event, now)[0]
    if after is state:
        return state, []
    unwanted = {rank.member for rank in (*after.gone, *_spent(after))}
    pids = tuple(rank.pid for rank in after.alive if rank.member in unwanted)
    instructions: list[Instruction] = [events.SignalRanks(pids, signal.SIGKILL)] if pids else []
    if after.generation != state.generation:
        instructions.append(events.RegroupEngine())
    if started := tuple(rank.member for rank in after.lobby if state.find(rank.member) is None):
        instructions.append(events.StartNewcomers(started))
    return after, instructions


def renumber(state: JobState, event: events.Regrouped, now: float) -> Step:
    """The bookkeeping alone. An older word changes nothing, one of the same generation no rank."""
    same = event.generation == state.generation
    if event.generation < state.generation or (same and event.joining == tuple(rank.member for rank in state.lobby)):
        return state, []
    known = {rank.member: rank for rank in state.present}
    lobby = tuple(
        replace(known[one.member], rank=one.rank) if one.member in known else state.find(one.member) or one
        for one in newcomers(event.joining)
    )
    after = replace(state, lobby=lobby) if same else _next(state, event, known, lobby)
    staying = {rank.member for rank in after.present}
    out = tuple(rank for member, rank in known.items() if member not in staying)
    gone = tuple(rank for rank in after.gone if rank.member not in staying)
    return armed(replace(after, gone=(*gone, *out))), []


def _next(state: JobState, event: events.Regrouped, known: dict[int, Rank], lobby: tuple[Rank, ...]) -> JobState:
    ranks = tuple(
        replace(known[member], rank=rank, ends_by=None)
        for rank, member in sorted(zip(event.ranks, event.members, strict=True))
        if member in known
    )
    named = {*event.members, *event.joining}
    dismissed = tuple(rank for rank in state.ranks if event.planned and rank.member not in named)
    return replace(
        state,
        generation=event.generation,
        ranks=ranks,
        lobby=lobby,
        leaving=(*(rank for rank in state.leaving if rank.member not in named), *dismissed),
        peers=event.addresses,
        suspended=state.suspended if event.planned else "",
        lost_hosts=state.lost_hosts if event.planned else (),
        lost_nodes=state.lost_nodes if event.planned else (),
        accused=state.accused if event.planned else (),
        waiting="",
    )


def entered(state: JobState, event: events.Entered, now: float) -> Step:
    """Handles that the engine has followed. Whoever is not in the generation may end by itself. A newcomer that is in
    it, and has to wait for another one, is of no use: it can't go back. That the generation has lost somebody may have
    been told before: it stays so.
    """
    if event.generation < state.entered:
        return state, []
    after = replace(state, passes=max(state.passes, event.passes))
    if event.generation > state.entered:
        after = replace(after, entered=event.generation, suspended="", lost_hosts=(), lost_nodes=(), accused=())
    for member in event.members:
        after = after.update(member, outside=False, ready=False)
    for rank in after.leaving:
        if rank.member not in event.members and rank.ends_by is None:
            after = after.update(rank.member, ends_by=now + LEAVE_S)
    pids = tuple(rank.pid for rank in _spent(after) if rank.phase is RankPhase.RUNNING)
    if state.phase is not Phase.RUNNING:
        return after, []
    return armed(after), [events.SignalRanks(pids, signal.SIGKILL)] if pids else []


def _spent(state: JobState) -> list[Rank]:
    return [rank for rank in state.lobby if not rank.outside]


def suspended(state: JobState, event: events.Suspended, now: float) -> Step:
    """Handles a suspension of the generation that the engine is in, or of one that it has entered meanwhile."""
    if event.generation < state.entered:
        return state, []
    if event.generation > state.entered:
        state = replace(state, suspended="", lost_hosts=(), lost_nodes=(), accused=())
    lost = dict(zip(state.lost_hosts, state.lost_nodes, strict=True))
    if event.host >= 0:
        lost[event.host] = event.node
    return replace(
        state,
        entered=event.generation,
        suspended=state.suspended or event.text,
        lost_hosts=tuple(sorted(lost)),
        lost_nodes=tuple(lost[host] for host in sorted(lost)),
        accused=tuple(sorted({*state.accused, *event.accused} - {""})),  # "": a host that is not known any more
        passes=max(state.passes, event.passes),
    ), []


def lost(state: JobState, member: int, now: float) -> JobState:
    """Handles that the engine has lost a rank whose process may live."""
    rank = state.find(member)
    if rank is None or rank.phase is not RankPhase.RUNNING or rank.ends_by is not None:
        return state
    return armed(state.update(member, ends_by=now + LOST_S))


def end_island(state: JobState, member: int) -> Step:
    """Kills the others of an island that has lost this member: they would wait for it in torch's collectives, or fail
    there. Members that were lost before it keep their own reasons."""
    rank = state.find(member)
    mates = state.island(rank) if rank is not None else ()
    mates = tuple(one for one in mates if one.phase is RankPhase.RUNNING and not (one.left or one.ends_by == math.inf))
    for mate in mates:
        state = state.update(mate.member, ends_by=math.inf)
        if rank is not None and not (mate.lost or mate.told_lost):
            state = state.update(mate.member, told_lost=True, follows=True, reason=island_words(rank.rank))
    return state, [events.SignalRanks(tuple(mate.pid for mate in mates), signal.SIGKILL)] if mates else []


def overdue(state: JobState, event: events.TimerFired, now: float) -> Step:
    """Kills who should have ended by itself."""
    late = [rank for rank in state.alive if rank.ends_by is not None and rank.ends_by <= now]
    for rank in late:
        state = state.update(rank.member, ends_by=math.inf)  # for ``ended_here``: this node has killed it
    pids = tuple(rank.pid for rank in late)
    return armed(state), [events.SignalRanks(pids, signal.SIGKILL)] if pids else []


def ended_here(state: JobState, member: int) -> str:
    """Says why this node has killed it, in words; empty if it has not."""
    rank = state.find(member)
    if rank is None or rank.ends_by != math.inf:
        return SPENT if rank in _spent(state) else ""
    if rank.told_lost:
        return rank.reason
    if rank in state.leaving:
        return overdue_words(LEAVE_S, "a planned change had dismissed it")
    return overdue_words(LOST_S, "the others had lost it")


def armed(state: JobState) -> JobState:
    """Sets the deadline to that of the first that has one, while the job runs."""
    if state.phase is not Phase.RUNNING:
        return state
    # inf: it was killed already.
    times = (rank.ends_by for rank in state.alive if rank.ends_by is not None and rank.ends_by < math.inf)
    return replace(state, deadline=min(times, default=None))


def left_behind(state: JobState) -> bool:
    """True if nothing is to be done here any more: everybody was dismissed, and has ended."""
    if state.ranks or state.lobby or not state.leaving or state.alive:
        return False
    return all(rank.exit_code == 0 or rank.ends_by is not None for rank in state.leaving)


def ready(state: JobState, event: events.ReadyToJoin, now: float) -> Step:
    """Notes that a member is ready to join. Only one that is in no generation can be."""
    rank = state.find(event.rank)
    return (state.update(event.rank, ready=True) if rank is not None and rank.outside else state), []


def takes_newcomers(state: JobState, event: events.TakesNewcomers, now: float) -> Step:
    """Notes, for good, that a member takes newcomers. A newcomer says so as soon as it trains like everybody else."""
    return replace(state.update(event.rank, newcomer=False), takes_newcomers=True), []


def not_started(state: JobState, event: events.SpawnFailed, now: float) -> Step:
    """A newcomer that can't be started is no failure of those that go on."""
    end = {"phase": RankPhase.EXITED, "exit_code": NOT_STARTED, "error_tail": event.text}
    return state.update(event.rank, **end), []
