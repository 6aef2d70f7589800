"""The state machine of one job on this node: a pure function from state, event and `now` to state and instructions.

``PREPARING`` -> ``RUNNING`` -> ``TERMINATING`` -> ``KILLING`` -> ``CLOSING`` -> ``STOPPED``, with ``FAILING`` between
the first failure and either the coordinator's StopJob or the time that this node waits for it. Steps may be left out;
none goes back.

In an elastic job a death by signal is no failure: the engine suspends its generation, the job stays ``RUNNING``, and
``Regrouped`` begins the next one (membership.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bagua.daemon.node.rules import events, membership
from bagua.daemon.node.rules.events import Event, Instruction
from bagua.daemon.node.rules.state import JobState, Phase, RankPhase, describe_exit

# How long the other ranks have, after the first failure, to end by their CommunicationError or the coordinator's word.
FAILING_S = 5.0
# The same where a rank has told why it fails: its exit code is waited for, and interpreters take long to end.
TOLD_S = 10.0
KILLING_S = 10.0  # how long a process may take to die of SIGKILL before the job is given up as it is
# How long an engine's error waits for the exit of a rank whose connection is gone: that exit is the cause, then.
VERDICT_S = 0.5

# Exit code of a shell whose program was killed: in an elastic job the same as if the rank had been.
KILLED_BELOW = 128 + signal.SIGKILL

Step = tuple[JobState, list[Instruction]]
Handler = Callable[[JobState, Any, float], Step]


def step(state: JobState, event: Event, now: float) -> Step:
    """Makes one transition. An event that means nothing in this phase changes nothing. ``now``: seconds of any steady
    clock."""
    handler = TABLE.get((state.phase, type(event)))
    if handler is None:
        return state, []
    after, instructions = handler(state, event, now)
    if after.visible != state.visible:
        instructions = [*instructions, events.Report()]
    return after, instructions


def _fail(state: JobState, now: float, failure: str, error: str = "") -> Step:
    """The first failure: everybody who waits in the engine learns the cause, then the end is waited for, but not for
    long."""
    after = replace(
        state,
        phase=Phase.FAILING,
        failure=failure,
        error=state.error or error,
        pending_error="",
        aborted=True,
        deadline=now + FAILING_S,
    )
    return after, [] if state.aborted else [events.Abort(failure)]


def _close(state: JobState) -> Step:
    return replace(state, phase=Phase.CLOSING, deadline=None, waiting=""), [events.CloseEngine()]


def _terminate(state: JobState, now: float, reason: str, grace_s: float, others_go_on: bool = False) -> Step:
    """SIGTERM to whoever lives, and a time for it. Ranks that others started get the engine's word alone."""
    state = replace(state, failure=state.failure or reason, pending_error="")
    if not state.alive:
        return _close(state)
    withdraws = state.elastic and (state.withdrawn or others_go_on)
    instructions: list[Instruction] = (
        [] if state.aborted else [events.Withdraw(reason) if withdraws else events.Abort(reason)]
    )
    if not state.adopt:
        instructions.append(events.SignalRanks(tuple(rank.pid for rank in state.alive), signal.SIGTERM))
    return replace(state, phase=Phase.TERMINATING, aborted=True, deadline=now + grace_s), instructions


def _prepared(state: JobState, event: events.EngineReady, now: float) -> Step:
    instructions: list[Instruction] = [events.SetPeers(state.peers)] if state.peers else []
    if not state.adopt:
        instructions.append(events.SpawnRanks())
    if state.generation > state.entered > 0:  # it was decided while the engine was made
        instructions.append(events.RegroupEngine())
    deadline = now + state.join_s if state.adopt else None
    after = replace(state, phase=Phase.RUNNING, engine=True, address=event.address, deadline=deadline)
    return (membership.armed(after) if state.elastic and not state.adopt else after), instructions


def _prepare_failed(state: JobState, event: events.PrepareFailed, now: float) -> Step:
    return replace(state, phase=Phase.STOPPED, failure=event.text, error=event.text, waiting=""), []


def _stop_preparing(state: JobState, event: events.StopRequested, now: float) -> Step:
    stopped = replace(state, phase=Phase.STOPPED, failure=event.reason, error=event.error, waiting="")
    return replace(stopped, withdrawn=bool(event.error)), []


def _peers_early(state: JobState, event: events.PeersKnown, now: float) -> Step:
    return replace(state, peers=event.addresses), []


def _peers(state: JobState, event: events.PeersKnown, now: float) -> Step:
    if state.peers:
        return state, []
    return replace(state, peers=event.addresses), [events.SetPeers(event.addresses)]


def _late_engine(state: JobState, event: events.EngineReady, now: float) -> Step:
    return state, [events.CloseEngine()]  # the job was stopped while it was made


def _started(state: JobState, event: events.RankStarted, now: float) -> Step:
    rank = state.find(event.rank)
    if rank is None or state.adopt or rank.phase is not RankPhase.WAITING:
        return state, []
    return state.update(event.rank, phase=RankPhase.RUNNING, pid=event.pid), []


def _spawn_failed(state: JobState, event: events.SpawnFailed, now: float) -> Step:
    rank = state.find(event.rank)
    if rank is not None and rank.newcomer and state.ranks:
        return membership.not_started(state, event, now)
    return _fail(state, now, event.text, error=event.text)


def _joined(state: JobState, event: events.RankJoined, now: float) -> Step:
    rank = state.find(event.rank)
    if rank is None or not state.adopt or rank.phase is not RankPhase.WAITING:
        return state, []
    if _nobody_joined(state):
        state = replace(state, deadline=None)
    return state.update(event.rank, phase=RankPhase.RUNNING, pid=event.pid), []


def _connected(state: JobState, event: events.RankConnected, now: float) -> Step:
    return state.update(event.rank, connected=True), []


def _left(state: JobState, event: events.RankLeft, now: float) -> Step:
    """Takes a farewell as an exit, of ranks that others started alone: the process of the rest is watched."""
    rank = state.find(event.rank)
    if rank is None or rank.phase is not RankPhase.RUNNING:
        return state, []
    if not state.adopt:
        return (state.update(event.rank, left=True) if state.elastic else state), []
    return state.update(event.rank, phase=RankPhase.EXITED, exited_at=event.at), []


def _mark_lost(state: JobState, event: events.RankLost, now: float) -> Step:
    rank = state.find(event.rank)
    if rank is None or rank.phase is RankPhase.WAITING:
        return state, []
    follows = event.after_error or _failed(state)
    if not state.adopt:
        if rank.lost or rank.phase is RankPhase.EXITED:
            return state.update(event.rank, lost=True), []
        return state.update(event.rank, lost=True, follows=follows), []
    if rank.phase is RankPhase.EXITED:
        return state, []
    gone = {
        "exit_code": -signal.SIGKILL,
        "signal": int(signal.SIGKILL),
        "error_tail": event.text,
        "exited_at": event.at,
        "follows": follows,
    }
    return state.update(event.rank, phase=RankPhase.EXITED, lost=True, **gone), []


def _lost(state: JobState, event: events.RankLost, now: float) -> Step:
    after, _ = _mark_lost(state, event, now)
    rank = after.find(event.rank)
    if after is not state and after.adopt and rank is not None:
        text = f"rank {rank.rank} (pid {rank.pid}) on node {state.node_id} is gone: {event.text}"
        return _fail(after, now, text)
    return membership.end_island(membership.lost(after, event.rank, now), event.rank) if after.elastic else (after, [])


def _mark_told(state: JobState, event: events.RankTold, now: float) -> Step:
    """Notes what a rank has told of its end; the engine has closed its connection."""
    rank = state.find(event.rank)
    if rank is None or rank.phase is not RankPhase.RUNNING or rank.told_lost:
        return state, []
    told: dict[str, Any] = {"reason": event.text, "lost": event.lost, "told_lost": event.lost}
    told["follows"] = _failed(state) or any(mate.reason for mate in state.island(rank))
    if state.adopt:  # nobody tells of the end of its process
        signum = int(signal.SIGKILL) if event.lost else 0
        told |= {"phase": RankPhase.EXITED, "exit_code": -signum or 1, "signal": signum}
        told |= {"error_tail": event.text, "exited_at": event.at}
    return state.update(event.rank, **told), []


def _told(state: JobState, event: events.RankTold, now: float) -> Step:
    after, instructions = _mark_told(state, event, now)
    rank = after.find(event.rank)
    if after is state or rank is None:
        return after, instructions
    if after.elastic and (event.lost or rank.newcomer or rank not in after.ranks):
        after = membership.lost(after, event.rank, now)
        return membership.end_island(after, event.rank) if event.lost else (after, [])
    if after.island(rank):  # torch's group may have lost another one, of which nobody has told yet: the exit tells
        return membership.lost(after, event.rank, now), []
    if event.lost and not after.adopt:
        return after, instructions  # the engine fails, and its process ends
    failing, instructions = _fail(after, now, f"rank {rank.rank} (pid {rank.pid}) has failed: {event.text}")
    return replace(failing, deadline=now + TOLD_S), instructions


def _mark_exited(state: JobState, event: events.RankExited, now: float) -> Step:
    rank = state.find(event.rank)
    if rank is None or rank.phase is RankPhase.EXITED:
        return state, []
    end = {"exit_code": event.exit_code, "signal": event.signal, "error_tail": event.error_tail, "exited_at": event.at}
    end["reason"] = rank.reason or event.reason
    follows = any(mate.signal for mate in state.island(rank)) and event.exit_code > 0
    if state.elastic and (rank.told_lost or follows or event.exit_code == KILLED_BELOW):
        end |= {"exit_code": -signal.SIGKILL, "signal": int(signal.SIGKILL)}
    elif rank.reason and event.signal:  # it has failed, and took long to end
        end |= {"exit_code": 1, "signal": 0}
    if not rank.lost and not rank.reason:  # else the end of its connection, or the rank, has told more exactly
        end["follows"] = _failed(state)
    return state.update(event.rank, phase=RankPhase.EXITED, **end), []


def _exited(state: JobState, event: events.RankExited, now: float) -> Step:
    after, instructions = _mark_exited(state, event, now)
    rank = after.find(event.rank)
    if after.elastic and rank is not None and (rank.signal or rank.newcomer or rank not in after.ranks):
        if membership.left_behind(after):
            return _close(after)
        return membership.end_island(after, event.rank) if rank.signal else (after, [])
    if after is not state and rank is not None and (rank.exit_code or rank.signal):
        return _fail(after, now, describe_exit(rank, state.node_id))
    return after, instructions


def _engine_failed(state: JobState, event: events.EngineFailed, now: float) -> Step:
    if state.pending_error:
        return state, []
    if event.host >= 0:
        state = replace(state, lost_hosts=(event.host,), lost_nodes=(event.node,))
    if any(rank.lost for rank in state.ranks) and not state.elastic:
        return replace(state, pending_error=event.text, deadline=now + VERDICT_S), []
    return _fail(state, now, event.text, error=event.text)


def _regrouped(state: JobState, event: events.Regrouped, now: float) -> Step:
    after, instructions = membership.regroup(state, event, now)
    return _close(after) if membership.left_behind(after) else (after, instructions)


def _waits(state: JobState, event: events.WaitsChanged, now: float) -> Step:
    return replace(state, waiting=event.text), []


def _nobody_joined(state: JobState) -> bool:
    return state.adopt and all(rank.phase is RankPhase.WAITING for rank in state.ranks)


def _running_timer(state: JobState, event: events.TimerFired, now: float) -> Step:
    if not _due(state, now):
        return state, []
    if state.pending_error:
        return _verdict(state, now)
    if state.elastic:
        return membership.overdue(state, event, now)
    if _nobody_joined(state):
        text = f"no rank joined on node {state.node_id} within {state.join_s:g} s"
        return _fail(state, now, text, error=text)
    return state, []


def _verdict(state: JobState, now: float) -> Step:
    if not any(rank.lost for rank in state.alive):  # they ended with code 0: if others miss them, those will fail
        return replace(state, pending_error="", deadline=None), []
    return _fail(state, now, state.pending_error, error=state.pending_error)


def _stop(state: JobState, event: events.StopRequested, now: float) -> Step:
    if event.error and not state.failure:
        state = replace(state, error=event.error, withdrawn=True)
    return _terminate(state, now, event.reason, event.grace_s, event.others_go_on)


def _failing_timer(state: JobState, event: events.TimerFired, now: float) -> Step:
    return _terminate(state, now, state.failure, state.grace_s) if _due(state, now) else (state, [])


def _hurry(state: JobState, event: events.StopRequested, now: float) -> Step:
    """Handles a second request, which may shorten the time that is left, but never lengthen it."""
    deadline = now + event.grace_s
    return replace(state, deadline=deadline if state.deadline is None else min(state.deadline, deadline)), []


def _ending_started(state: JobState, event: events.RankStarted, now: float) -> Step:
    after, _ = _started(state, event, now)
    if after is state:
        return state, []
    signum = signal.SIGTERM if state.phase is Phase.TERMINATING else signal.SIGKILL
    return after, [events.SignalRanks((event.pid,), signum)]


def _close_when_empty(handler: Handler) -> Handler:
    """Wraps a transition of the ending phases: the last rank's end is the time to close."""

    def then_close(state: JobState, event: Event, now: float) -> Step:
        after, instructions = handler(state, event, now)
        if after.alive:
            return after, instructions
        closing, more = _close(after)
        return closing, [*instructions, *more]

    return then_close


def _kill(state: JobState, event: events.TimerFired, now: float) -> Step:
    if not _due(state, now):
        return state, []
    if state.adopt:
        return _close(state)  # those that others started are not killed here
    pids = tuple(rank.pid for rank in state.alive)
    return replace(state, phase=Phase.KILLING, deadline=now + KILLING_S), [events.SignalRanks(pids, signal.SIGKILL)]


def _give_up(state: JobState, event: events.TimerFired, now: float) -> Step:
    if not _due(state, now):
        return state, []
    names = ", ".join(f"rank {rank.rank} (pid {rank.pid})" for rank in state.alive)
    text = f"{names} on node {state.node_id} did not die of SIGKILL in {KILLING_S:g} s: look at the machine"
    return _close(replace(state, error=state.error or text))


def _closed(state: JobState, event: events.EngineClosed, now: float) -> Step:
    return replace(state, phase=Phase.STOPPED, engine=False), []


def _failed(state: JobState) -> bool:
    """True if something has failed here: what ends from now on most likely ends because of that."""
    return bool(state.failure or state.pending_error or state.aborted)


def _due(state: JobState, now: float) -> bool:
    return state.deadline is not None and now >= state.deadline


_BOOKKEEPING: dict[type[Event], Handler] = {
    events.RankConnected: _connected,
    events.RankLeft: _left,
    events.RankLost: _mark_lost,
    events.RankTold: _mark_told,
    events.RankExited: _mark_exited,
    events.Regrouped: membership.renumber,
    events.Entered: membership.entered,
    events.ReadyToJoin: membership.ready,
    events.TakesNewcomers: membership.takes_newcomers,
}
_ENDING: dict[type[Event], Handler] = {kind: _close_when_empty(handler) for kind, handler in _BOOKKEEPING.items()}

_BY_PHASE: dict[Phase, dict[type[Event], Handler]] = {
    Phase.PREPARING: {
        events.EngineReady: _prepared,
        events.PrepareFailed: _prepare_failed,
        events.PeersKnown: _peers_early,
        events.WaitsChanged: _waits,
        events.Regrouped: membership.renumber,
        events.StopRequested: _stop_preparing,
    },
    Phase.RUNNING: {
        events.PeersKnown: _peers,
        events.RankStarted: _started,
        events.SpawnFailed: _spawn_failed,
        events.RankJoined: _joined,
        events.RankConnected: _connected,
        events.RankLeft: _left,
        events.RankLost: _lost,
        events.RankTold: _told,
        events.RankExited: _exited,
        events.EngineFailed: _engine_failed,
        events.Suspended: membership.suspended,
        events.Regrouped: _regrouped,
        events.Entered: membership.entered,
        events.ReadyToJoin: membership.ready,
        events.TakesNewcomers: membership.takes_newcomers,
        events.WaitsChanged: _waits,
        events.TimerFired: _running_timer,
        events.StopRequested: _stop,
    },
    Phase.FAILING: {
        **_BOOKKEEPING,
        events.RankStarted: _started,
        events.TimerFired: _failing_timer,
        events.StopRequested: _stop,
    },
    Phase.TERMINATING: {
        **_ENDING,
        events.RankStarted: _ending_started,
        events.TimerFired: _kill,
        events.StopRequested: _hurry,
    },
    Phase.KILLING: {**_ENDING, events.RankStarted: _ending_started, events.TimerFired: _give_up},
    Phase.CLOSING: {
        events.RankExited: _mark_exited,
        events.Regrouped: membership.renumber,
        events.EngineClosed: _closed,
    },
    Phase.STOPPED: {events.EngineReady: _late_engine},
}

TABLE: dict[tuple[Phase, type[Event]], Handler] = {
    (phase, event): handler for phase, handlers in _BY_PHASE.items() for event, handler in handlers.items()
}
