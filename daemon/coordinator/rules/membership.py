"""Decides how the membership of an elastic job changes: pure functions of facts and clock.

    evidence     who is out           generations  form the next one
    broken_links who is put out, where hosts can't talk with each other
    joins        who is started       planned      who enters and leaves after the same step everywhere

A loss comes first. Its generation consists of members that have state, at once; planned changes and newcomers follow
when everybody has entered it, so no newcomer is there where a step has to be repeated. The hosts themselves see to it
that a step commits everywhere or nowhere; nothing here knows of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bagua.base import islands
from bagua.daemon.coordinator.rules.broken_links import Pair, pairs_between, put_out
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState, Phase, Plan
from bagua.daemon.coordinator.rules.evidence import (
    Evidence,
    begins_anew,
    failed_by_itself,
    find,
    leaving,
    passed,
    progressed,
)
from bagua.daemon.coordinator.rules.failure_reasons import Cause, Nodes
from bagua.daemon.coordinator.rules.generations import Regroup, survivors
from bagua.daemon.coordinator.rules.joins import Wave, give_up, start_newcomers
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.placement import names
from bagua.daemon.coordinator.rules.planned import PAUSED, below, change, enough

Step = Regroup | Wave | Cause | None


def next_generation(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Step, float | None]:
    """Returns (the next change of its membership, or why the job has to stop, None), or (None, when to look again).
    ``job`` is elastic and under way. One in which something has failed by itself gets none: it has to stop, as
    ``causes`` will say.
    """
    if any(failed_by_itself(host) for host in job.hosts):
        return None, None
    evidence = find(job, nodes, now, options)
    if evidence and leaving(job, evidence.lost):
        return None, evidence.wake
    gone, wake = give_up(job, nodes, now, options)
    if gone is not None:
        return gone, None
    wakes = [wake, evidence.wake]
    step: Step
    if evidence.lost or evidence.dead:
        step, wake = _without(job, evidence, now), None
    elif job.plan.holds:
        step, wake = _resume(job, evidence, nodes, now, options)
    elif evidence.suspended:
        step, wake = _again(job, evidence, now, options)
    else:
        step, wake = change(job, nodes, now, options)
    wakes.append(wake)
    if step is None:
        step, wake = start_newcomers(job, nodes, now, options)
        wakes.append(wake)
    return step, min((at for at in wakes if at is not None), default=None) if step is None else None


def _without(job: JobRecord, evidence: Evidence, now: float) -> Step:
    """Goes on with all members that run, but for those that are lost."""
    words = evidence.words
    if _only_newcomers(job, evidence):  # nobody else is hurt: what was planned stays so
        step = replace(survivors(job, evidence.lost, now, newcomers_stay=True), plan=Plan.PLANNED)
        # A stall of the others is not over with it.
        step = replace(step, stalls=job.stalls, stalled_passes=job.stalled_passes, accusations=job.accusations)
        return replace(step, reason=_reason(job, words, step))
    step = survivors(job, evidence.lost, now, newcomers_stay=passed(job))
    if all(host.new for host in step.hosts):
        return Cause(JobState.FAILED, f"{words}; no rank is left that runs")  # also if others had ended with code 0
    if job.paused:
        return replace(step, plan=Plan.STANDSTILL, reason=f"{PAUSED}; {words}")
    after = replace(job, hosts=step.hosts, joining=step.joining)
    if enough(after):
        return replace(step, reason=_reason(job, words, step))
    left = "1 node is left" if len(step.hosts) == 1 else f"{len(step.hosts)} nodes are left"
    missing = f"{words}; {left}, and the job needs at least {job.least}"
    if not any(host.takes_newcomers for host in job.hosts):
        return Cause(JobState.FAILED, f"{missing}: its program takes no newcomers")
    return replace(step, plan=Plan.STANDSTILL, reason=f"{below(after)}: {missing}")


def _resume(
    job: JobRecord, evidence: Evidence, nodes: Nodes, now: float, options: Options
) -> tuple[Step, float | None]:
    """Decides about a job that waits: it goes on once nobody wants it paused and there are enough nodes."""
    if job.plan is Plan.HOLD and not evidence.suspended:
        return change(job, nodes, now, options)
    if job.paused or not enough(job):
        return None, None
    step = survivors(job, (), now, newcomers_stay=True)
    return replace(step, reason=_reason(job, "it need not wait any more", step)), None


def _again(job: JobRecord, evidence: Evidence, now: float, options: Options) -> tuple[Step, float | None]:
    """A connection broke, but nobody is known to be lost: the same members once more, after a moment. A host that
    others have lost and that has not spoken since gets the time of a lease to do so. If that has happened before, and
    no step was made since, the hosts that can't talk with each other are parted when all have spoken."""
    suspended = evidence.suspended
    anew = begins_anew(job, now, options)
    links, restarts, began = _accusations(job, () if anew else job.accusations)
    stalls = (0 if anew else job.stalls) + (not began)
    # A host that comes back with a broken link had its chance. Hosts that have made a step since get another one.
    known = set() if progressed(job, now, options) else {node_id for node_id, _, _ in job.put_out}
    parting = bool(links) and (stalls > 1 or any(known.intersection(pair) for pair in links))
    accused = {name for host in suspended for name in host.lost_hosts}
    awaited = (host for host in job.hosts if parting or host.node_id in accused)
    alive = all(host.suspended or (parting and host.phase is Phase.STOPPED) for host in awaited)
    first = min(suspended, key=lambda host: (host.suspended_clock, host.index))
    at = first.suspended_clock + (options.regroup_s if alive else options.lease_s)
    if evidence.away:  # the node comes back, or is lost
        return None, evidence.wake
    if now < at:
        return None, at
    if parting:
        step = _part(job, evidence, links, now, options)
        if isinstance(step, Regroup) or stalls > options.max_stalls:  # else the job would end: the links may be back
            return step, None
    if killed := {node_id for node_id, _ in restarts if restarts.count((node_id, node_id)) > options.max_stalls}:
        text = f"was started again {options.max_stalls + 1} times in a row, and no step was made meanwhile"
        lost = {host.node_id: f"the daemon on node {host.name} {text}" for host in job.hosts if host.node_id in killed}
        return _leave_out(job, evidence, lost, now, options), None
    words = f"node {first.name}: {first.suspended}"
    if stalls > options.max_stalls:
        text = f"the connections broke {stalls} times in a row, though no member is lost; the last time: {words}"
        return Cause(JobState.FAILED, text), None
    step = survivors(job, (), now, newcomers_stay=passed(job))
    if not step.hosts:  # whoever was there has ended well
        return None, None
    plan = Plan.PLANNED if _only_newcomers(job, evidence) else Plan.AT_ONCE
    if plan is Plan.PLANNED:
        step = survivors(job, (), now, newcomers_stay=True)
    stalled, accusations = job.passes + 1 if anew else job.stalled_passes, (*links, *restarts)
    step = replace(step, stalls=stalls, stalled_passes=stalled, accusations=accusations, plan=plan)
    return replace(step, reason=_reason(job, words, step)), None


def _accusations(job: JobRecord, before: Sequence[Pair]) -> tuple[tuple[Pair, ...], list[Pair], set[str]]:
    """Returns (broken links; a pair of a node with itself for each time that its daemon was started again; nodes where
    that is why the job is suspended). Those of ``before`` are among the first two."""
    # Such a daemon names itself: no link is broken, and nothing has stalled.
    began = {host.node_id for host in job.hosts if host.node_id in host.accused}
    told = ((host.node_id, other) for host in job.hosts for other in host.accused)
    told = (pair for pair in told if not began.intersection(pair))
    links = pairs_between((*before, *told), (host.node_id for host in job.hosts))
    restarts = [pair for pair in before if pair[0] == pair[1]]
    if len(began) < len(job.hosts):  # else nobody is left who tells of steps
        restarts += sorted((node_id, node_id) for node_id in began)
    return links, restarts, began


def _part(job: JobRecord, evidence: Evidence, pairs: Sequence[Pair], now: float, options: Options) -> Step:
    """Goes on without the hosts that cover all broken links."""
    out = put_out(job.hosts, pairs)
    lost = {}
    for host in (host for host in job.hosts if host.node_id in out):
        others = names(sorted({*sum((pair for pair in pairs if host.node_id in pair), ())} - {host.node_id}))
        lost[host.node_id] = f"node {host.name} is put out, since nothing passes between it and {others}"
    return _leave_out(job, evidence, lost, now, options)


def _leave_out(job: JobRecord, evidence: Evidence, lost: dict[str, str], now: float, options: Options) -> Step:
    """Goes on without these hosts, which are asked again later. ``lost``: node -> why."""
    entries = []
    for host in (host for host in job.hosts if host.node_id in lost):
        before = sum(node_id == host.node_id for node_id, _, _ in job.put_out)
        until = now + min(options.mend_s * 2.0 ** min(before, 30), options.most_rejoin_s)
        entries.append((host.node_id, host.boot_id, until))
    step = _without(job, replace(evidence, lost=lost), now)
    if not isinstance(step, Regroup):
        return step
    # The wrong one may have gone: the rest has had its first stall, and makes a step before anybody joins.
    return replace(step, put_out=tuple(entries), stalls=1, stalled_passes=job.passes + 1)


def _only_newcomers(job: JobRecord, evidence: Evidence) -> bool:
    """True if a planned change loses newcomers, before anybody else has entered it."""
    if job.plan is not Plan.PLANNED or passed(job):
        return False
    hosts = {host.node_id: host for host in job.hosts}
    return (
        all(hosts[node_id].new for node_id in evidence.lost)
        and all(rank.newcomer for rank in evidence.dead)
        and all(host.new for host in evidence.suspended)
    )


def _reason(job: JobRecord, words: str, step: Regroup) -> str:
    left, size = sum(host.nranks for host in step.hosts), job.spec.island_size
    go = f"{islands.count(left, size)} {'goes' if left == size else 'go'} on"
    return f"generation {job.generation + 1}: {words}; {_islands_out(job, step)}{go}{_unreplaced(job, step, left)}"


def _islands_out(job: JobRecord, step: Regroup) -> str:
    """Names islands that are lost as a whole; empty where an island is one rank."""
    staying = {rank.number for host in step.hosts for rank in host.ranks}
    size = job.spec.island_size
    out = sorted({rank.rank // size for rank in job.ranks if rank.number not in staying}) if size > 1 else []
    return f"{'island' if len(out) == 1 else 'islands'} {names([str(one) for one in out])} lost; " if out else ""


def _unreplaced(job: JobRecord, step: Regroup, left: int) -> str:
    """Says why nobody will replace lost ranks, if that is wanted (``--respawn``); else nothing."""
    whole = left == len(step.hosts) * job.spec.nproc_per_node
    if not job.spec.respawn or whole or any(host.takes_newcomers for host in job.hosts):
        return ""
    return ", and nobody joins: the program has called neither ElasticSampler.epochs() nor wait_to_join()"
