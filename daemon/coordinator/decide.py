"""Decides the next state of a job: a table of states, and pure functions of facts and clock.

Nothing here reads a clock, draws a random number, or knows of databases and networks.
"""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from bagua.base.memory_kills import KILLER
from bagua.daemon.coordinator.domain import (
    Event,
    HostRecord,
    JobRecord,
    JobState,
    NodeView,
    Options,
    Phase,
    RankRecord,
)
from bagua.daemon.coordinator.placement import Placement, hosts_with_ranks, names, place

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.STARTING, JobState.FAILED, JobState.CANCELLED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}),
    JobState.RUNNING: frozenset({JobState.STOPPING}),
    JobState.STOPPING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

Nodes = Mapping[str, NodeView]


@dataclass(frozen=True)
class Decision:
    """What is to change, and why. Everything None: nothing changes."""

    state: JobState | None = None
    reason: str | None = None
    outcome: JobState | None = None  # with STOPPING: where the stop leads
    placement: Placement | None = None  # with STARTING
    wake_at: float | None = None  # decide again then, if no fact comes before
    note: str = ""  # for the event alone: the job's reason stays its first cause


@dataclass(frozen=True)
class Cause:
    """Why a job has to stop."""

    outcome: JobState
    reason: str


def decide(job: JobRecord, nodes: Nodes, now: float, options: Options) -> Decision:
    """The next step of ``job``. ``nodes``: all while the job is PENDING, else at least those of the job."""
    if job.state.terminal:
        return Decision()
    return _RULES[job.state](job, nodes, now, options)


def apply(job: JobRecord, decision: Decision, now: float, wall: float) -> tuple[JobRecord, tuple[Event, ...]]:
    """``job`` after ``decision``, and the events to record. ``now`` by the service clock, ``wall`` for people. Raises
    ValueError for a step that the table forbids."""
    state = job.state if decision.state is None else decision.state
    reason = job.reason if decision.reason is None else decision.reason
    if state is job.state:
        if reason == job.reason:
            return job, ()
        return replace(job, reason=reason), (Event("waiting", reason, job.generation, wall),)
    if state not in TRANSITIONS[job.state]:
        raise ValueError(f"job {job.job_id} can't go from {job.state.name} to {state.name}")
    job = replace(job, state=state, reason=reason)
    kind = "state"
    if decision.placement is not None:
        job = replace(_placed(job, decision.placement), placed_clock=now)
        kind = "placed"
    if state is JobState.RUNNING:
        job = replace(job, started_at=wall)
    if state is JobState.STOPPING:
        job = replace(job, outcome=decision.outcome, stopping_clock=now)
    if state.terminal:
        job = replace(job, finished_at=wall)
    text = reason if kind == "placed" else f"{state.name}: {reason}{decision.note}"
    return job, (Event(kind, text, job.generation, wall),)


def _placed(job: JobRecord, placement: Placement) -> JobRecord:
    hosts = hosts_with_ranks(job.spec, placement)
    return replace(
        job,
        generation=job.generation + 1,
        hosts=hosts,
        master_addr=hosts[0].address,
    )


# ---- one rule per state


def _pending(job: JobRecord, nodes: Nodes, now: float, options: Options) -> Decision:
    if job.cancel_reason is not None:
        return Decision(state=JobState.CANCELLED, reason=job.cancel_reason)
    found = place(job.spec, nodes.values())
    if isinstance(found, Placement):
        return Decision(state=JobState.STARTING, reason=f"placed on {names(found.node_ids)}", placement=found)
    timeout = job.spec.placement_timeout_s
    deadline = job.submitted_clock + timeout
    if job.submitted_clock < options.started_clock:  # the coordinator was away: nodes get time to come back
        deadline = max(deadline, options.started_clock + options.lease_s)
    if now >= deadline:
        waited = f"waited {timeout:g} s, but the job " if timeout else ""
        return Decision(state=JobState.FAILED, reason=f"{waited}{found}")
    return Decision(reason=found, wake_at=deadline)


def _active(job: JobRecord, nodes: Nodes, now: float, options: Options) -> Decision:
    """STARTING and RUNNING."""
    if job.cancel_reason is not None:
        return Decision(JobState.STOPPING, job.cancel_reason, JobState.CANCELLED)
    cause, wake_at = find_cause(job, nodes, now, options)
    if cause is not None:
        return Decision(JobState.STOPPING, cause.reason, cause.outcome)
    if job.state is JobState.STARTING:
        if all(host.started for host in job.hosts):
            return Decision(JobState.RUNNING, f"{_count(job.spec.world_size, 'rank')} started", wake_at=wake_at)
        late_at = job.placed_clock + options.start_s
        if now >= late_at:
            return Decision(JobState.STOPPING, _not_started(job, options), JobState.FAILED)
        wake_at = late_at if wake_at is None else min(wake_at, late_at)
    return Decision(wake_at=wake_at)


def _not_started(job: JobRecord, options: Options) -> str:
    late = [host.node_id for host in job.hosts if not host.started]
    silent = [host.node_id for host in job.hosts if host.phase is Phase.UNKNOWN]
    said = f"; no word of the job came from {names(silent)}" if silent else ""
    return f"not all ranks were started within {options.start_s:g} s: missing on {names(late)}{said}"


def _stopping(job: JobRecord, nodes: Nodes, now: float, options: Options) -> Decision:
    """Waits for every node to have stopped the job, but not for ever: a lost node's ranks are ended by their daemon
    when it can't renew its lease, and only then is the job over."""
    overdue_at = job.stopping_clock + job.spec.stop_grace_s + options.stop_margin_s
    wake: list[float] = []
    overdue: list[str] = []
    for host in job.hosts:
        if host.phase is Phase.STOPPED:
            continue
        heard = silent_since(host, nodes, options)
        deadline = overdue_at if heard is None else heard + options.gone_s
        if now < deadline:
            wake.append(deadline)
        elif heard is None:
            overdue.append(host.node_id)
    if wake:
        return Decision(wake_at=min(wake))
    waited = f"{job.spec.stop_grace_s + options.stop_margin_s:g} s"
    late = f" (not stopped within {waited}: {', '.join(overdue)}; their slots stay taken until they answer)"
    return Decision(job.outcome, job.reason, note=late if overdue else "")


_RULES: Mapping[JobState, Callable[[JobRecord, Nodes, float, Options], Decision]] = {
    JobState.PENDING: _pending,
    JobState.STARTING: _active,
    JobState.RUNNING: _active,
    JobState.STOPPING: _stopping,
}


# ---- causes


def silent_since(host: HostRecord, nodes: Nodes, options: Options) -> float | None:
    """When the node of ``host`` was heard of last; None while its session lives. The time before the start of this
    coordinator does not count."""
    node = nodes.get(host.node_id)
    if node is None:
        return options.started_clock
    if node.connected:
        return None
    return max(node.heard_clock, options.started_clock)


def find_cause(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Cause | None, float | None]:
    """(why the job has to stop, None), or (None, when to look again: None if only a fact can change the answer)."""
    failed = [rank for host in job.hosts if host.failed for rank in host.failed]
    direct = [rank for rank in failed if not _follows(rank, job)]
    if direct:
        first = min(direct, key=lambda rank: (rank.exited_at or math.inf, rank.rank))
        return Cause(JobState.FAILED, describe_exit(first)), None
    if not failed and all(host.exited for host in job.hosts):
        # Also with a node's error: it came too late to hurt any rank, and the events tell of it.
        return Cause(JobState.SUCCEEDED, f"{_count(job.spec.world_size, 'rank')} ended with exit code 0"), None
    wake: list[float] = []
    indirect = list(_indirect(job, failed))
    if indirect:
        since = min(seen for seen, _ in indirect)
        if now >= since + options.settle_s:
            return Cause(JobState.FAILED, indirect[0][1]), None
        wake.append(since + options.settle_s)
    for host in job.hosts:
        if host.phase is Phase.STOPPED:
            if not host.error and not host.exited:
                return Cause(JobState.FAILED, f"node {host.node_id} stopped the job by itself"), None
            continue
        heard = silent_since(host, nodes, options)
        if heard is None:
            continue
        if now >= heard + options.lease_s:
            text = f"node {host.name} has not been heard of for {options.lease_s:g} s"
            return Cause(JobState.FAILED, text), None
        wake.append(heard + options.lease_s)
    return None, min(wake, default=None)


def _follows(rank: RankRecord, job: JobRecord) -> bool:
    """True if the rank most likely failed because something else had failed before."""
    if rank.signal == signals.SIGTERM:
        return any(host.error for host in job.hosts if host.node_id == rank.node_id)
    return rank.follows


def _indirect(job: JobRecord, failed: list[RankRecord]) -> Iterator[tuple[float, str]]:
    """(when seen, text) of errors that may have a better cause, the clearest first."""
    reported = sorted((host for host in job.hosts if host.error), key=lambda host: (host.error_clock, host.index))
    for host in reported:
        # An error at launch, or of a node that is done with the job, has no better cause to wait for.
        final = host.phase in (Phase.PREPARING, Phase.STOPPED)
        yield (-math.inf if final else host.error_clock), host.error_text
    for rank in sorted(failed, key=lambda rank: (rank.seen_exited_clock, rank.rank)):
        yield rank.seen_exited_clock, describe_exit(rank)


def describe_exit(rank: RankRecord) -> str:
    """How a rank ended, in words; with the last line of what it wrote to stderr, or of what its node knows, if it
    failed."""
    lines = [line for line in rank.error_tail.splitlines() if line.strip()]
    last = lines[-1].strip()[:500] if lines else ""
    where = f"rank {rank.rank} on node {rank.node_id}"
    if rank.signal:
        try:
            name = signals.Signals(rank.signal).name
        except ValueError:
            name = f"signal {rank.signal}"
        return f"{where} was killed by {name}{f'. {last}' if last.startswith(KILLER) else ''}"
    detail = f": {last}" if last and rank.exit_code else ""
    return f"{where} exited with code {rank.exit_code}{detail}"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"all {number} {noun}s"
