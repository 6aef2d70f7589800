"""Decides the next state of a job: a table of states, and pure functions of facts and clock.

Nothing here reads a clock, draws a random number, or knows of databases and networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bagua.daemon.coordinator.rules.domain import Event, JobRecord, JobState, NodeView, Phase
from bagua.daemon.coordinator.rules.evidence import accusers, failed_by_itself, host_loss
from bagua.daemon.coordinator.rules.failure_reasons import Nodes, all_of, find_cause, silent_since
from bagua.daemon.coordinator.rules.generations import Regroup, regrouped
from bagua.daemon.coordinator.rules.joins import Wave
from bagua.daemon.coordinator.rules.membership import next_generation
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.placement import hosts_with_ranks, names, place
from bagua.daemon.coordinator.rules.planned import stop_late

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.STARTING, JobState.FAILED, JobState.CANCELLED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.STOPPING}),
    JobState.RUNNING: frozenset({JobState.WAITING, JobState.STOPPING}),
    JobState.WAITING: frozenset({JobState.RUNNING, JobState.STOPPING}),
    JobState.STOPPING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


@dataclass(frozen=True)
class Decision:
    """A change of a job, and its reason. Everything None: nothing changes."""

    state: JobState | None = None
    reason: str | None = None
    outcome: JobState | None = None  # with STOPPING: where the stop leads
    placement: tuple[NodeView, ...] | None = None  # with STARTING
    regroup: Regroup | None = None  # the next generation of a job that goes on
    wave: Wave | None = None  # newcomers that are started, or given up; or those that leave are stopped
    wake_at: float | None = None  # decide again then, if no fact comes before
    note: str = ""  # for the event alone: the job's reason stays its first cause


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
    if decision.regroup is not None:
        holds = decision.regroup.plan.holds
        state = JobState.WAITING if holds else JobState.RUNNING
        job = replace(regrouped(job, decision.regroup, now), state=state, reason=reason)
        text = f"WAITING: {reason}" if holds else reason
        return job, (Event("state" if holds else "regrouped", text, job.generation, wall),)
    if decision.wave is not None:
        if not decision.wave.reason:
            return decision.wave.job, ()
        return decision.wave.job, (Event(decision.wave.kind, decision.wave.reason, job.generation, wall),)
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


def _placed(job: JobRecord, placement: tuple[NodeView, ...]) -> JobRecord:
    hosts = hosts_with_ranks(job.spec, placement)
    return replace(
        job,
        generation=job.generation + 1,
        hosts=hosts,
        next_member=sum(host.nranks for host in hosts),
        master_addr=hosts[0].address,
    )


# ---- one rule per state


def _pending(job: JobRecord, nodes: Nodes, now: float, options: Options) -> Decision:
    if job.cancel_reason is not None:
        return Decision(state=JobState.CANCELLED, reason=job.cancel_reason)
    found = place(job.spec, nodes.values())
    if not isinstance(found, str):
        where = names([node.node_id for node in found])
        return Decision(state=JobState.STARTING, reason=f"placed on {where}", placement=found)
    timeout = job.spec.placement_timeout_s
    deadline = job.submitted_clock + timeout
    if job.submitted_clock < options.started_clock:  # the coordinator was away: nodes get time to come back
        deadline = max(deadline, options.started_clock + options.lease_s)
    if now >= deadline:
        waited = f"waited {timeout:g} s, but the job " if timeout else ""
        return Decision(state=JobState.FAILED, reason=f"{waited}{found}")
    return Decision(reason=found, wake_at=deadline)


def _active(job: JobRecord, nodes: Nodes, now: float, options: Options) -> Decision:
    """Decides about a job that is STARTING, RUNNING or WAITING."""
    if job.cancel_reason is not None:
        return Decision(JobState.STOPPING, job.cancel_reason, JobState.CANCELLED)
    lost, wake_at = _lost_at_start(job, nodes, now, options)
    started = job.state is JobState.STARTING and all(host.started for host in job.hosts if host.node_id not in lost)
    if len(lost) == len(job.hosts):
        return Decision(JobState.STOPPING, "; ".join(lost.values()), JobState.FAILED)
    if started and job.spec.elastic:  # now losses have their consequences, those that were seen already included
        there = sum(host.nranks for host in job.hosts if host.node_id not in lost)
        return Decision(JobState.RUNNING, f"{all_of(there, 'rank')} started")
    cause, cause_at = find_cause(job, nodes, now, options)
    wake_at = min((at for at in (wake_at, cause_at) if at is not None), default=None)
    if cause is not None:
        return Decision(JobState.STOPPING, cause.reason, cause.outcome)
    if job.state is JobState.STARTING:
        if started:
            return Decision(JobState.RUNNING, f"{all_of(len(job.ranks), 'rank')} started", wake_at=wake_at)
        late_at = job.placed_clock + options.start_s
        if now >= late_at:
            return Decision(JobState.STOPPING, _not_started(job, options), JobState.FAILED)
        wake_at = late_at if wake_at is None else min(wake_at, late_at)
    elif job.spec.elastic:
        return _goes_on(job, nodes, now, options, wake_at)
    return Decision(wake_at=wake_at)


def _lost_at_start(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[dict[str, str], float | None]:
    """Nodes of an elastic job that were lost before all ranks were started, each with the reason; and when to look
    again."""
    if job.state is not JobState.STARTING or not job.spec.elastic:
        return {}, None
    silent = [host for host in job.hosts if not failed_by_itself(host)]
    accused = accusers(job, nodes, options)
    losses = {host.node_id: host_loss(job, host, accused.get(host.node_id), nodes, now, options) for host in silent}
    wakes = [wake for words, wake in losses.values() if not words and wake is not None]
    return {name: words for name, (words, _) in losses.items() if words}, min(wakes, default=None)


def _goes_on(job: JobRecord, nodes: Nodes, now: float, options: Options, wake_at: float | None) -> Decision:
    step, wake = next_generation(job, nodes, now, options)
    if step is None:
        step, at = stop_late(job, now, options)
        wake = min((at for at in (wake, at) if at is not None), default=None)
    if isinstance(step, Regroup):
        return Decision(reason=step.reason, regroup=step)
    if isinstance(step, Wave):
        return Decision(wave=step)
    if step is not None:
        return Decision(JobState.STOPPING, step.reason, step.outcome)
    return Decision(wake_at=min((at for at in (wake, wake_at) if at is not None), default=None))


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
    for host in job.parts:
        if host.phase is Phase.STOPPED:
            continue
        heard = silent_since(host, nodes, options)
        deadline = overdue_at if heard is None else options.gone_at(heard, job.patience_s)
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
    JobState.WAITING: _active,
    JobState.STOPPING: _stopping,
}
