"""Decides planned changes of an elastic job: pure functions of facts and clock.

They happen after the same training step everywhere, so nothing is repeated, and one at a time: the next is decided when
all hosts have entered the generation of the last.
"""

from __future__ import annotations

from dataclasses import replace

from bagua.base import islands
from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, Phase, Plan
from bagua.daemon.coordinator.rules.evidence import begins_anew, ending, settled
from bagua.daemon.coordinator.rules.failure_reasons import Nodes
from bagua.daemon.coordinator.rules.generations import Regroup, changed
from bagua.daemon.coordinator.rules.joins import Wave, draining
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.placement import names

PAUSED = "paused"


def change(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Regroup | None, float | None]:
    """Returns (the next planned generation, None), or (None, when to look again). Nobody of ``job`` is lost."""
    holds = job.plan is Plan.HOLD
    if not settled(job) or (ending(job) and not holds):
        return None, None
    if job.paused:
        return (None if holds else _hold(job, PAUSED)), None
    admitted, wake = _ready(job, now, options)
    if admitted and not holds and job.stalls and not begins_anew(job, now, options):
        # Newcomers would enter alone, hold up the end of the stall, and could not go back: a step comes first.
        admitted, wake = [], job.placed_clock + options.stall_s + job.patience_s
    left = _leaving(job, nodes)
    admitted = admitted[: _room(job, nodes, left, admitted)]
    new = {part.node_id for part in admitted if job.host_index(part.node_id) is None}
    if len(job.hosts) - len(left) + len(new) < job.least:
        wait = None if holds or enough(job) else _hold(job, below(job))
        return wait, wake
    if not (holds or left or admitted):
        return None, wake
    step = changed(job, admitted, left)
    if not begins_anew(job, now, options):  # no step was made since the last stall: its broken links still count
        step = replace(step, stalls=job.stalls, stalled_passes=job.stalled_passes, accusations=job.accusations)
    return replace(step, reason=_reason(job, step, admitted, left)), None


def stop_late(job: JobRecord, now: float, options: Options) -> tuple[Wave | None, float | None]:
    """Returns (dismissed parts whose time begins, or is over; None), or (None, when to look again). Their time begins
    when everybody else has gone on without them.
    """
    # Their daemon ends ranks that have left the engine and go on. One that hangs before that, while a loss lets the
    # others go on at once, would hold its slots for ever: nobody waits for it any more.
    leaving = [part for part in job.former if part.dismissed and part.phase is not Phase.STOPPED]
    if not leaving:
        return None, None
    trains = [host.entered for host in job.hosts if host.phase is not Phase.STOPPED and not host.new]
    alone = [part for part in leaving if trains and min(trains) > part.last_generation]
    late = [part for part in alone if part.since_clock and now >= part.since_clock + options.leave_s]
    begun = [replace(part, since_clock=now) for part in alone if not part.since_clock]
    if not late and not begun:
        return None, min((part.since_clock + options.leave_s for part in alone), default=None)
    changed = {part.index: part for part in begun} | {part.index: replace(part, dismissed=False) for part in late}
    after = replace(job, former=tuple(changed.get(part.index, part) for part in job.former))
    verb, whose = ("is", "its") if len(late) == 1 else ("are", "their")
    text = f"{names([part.node_id for part in late])} {verb} stopped: {whose} ranks were to leave, and have not ended"
    return Wave(after, "stopped", f"{text} {options.leave_s:g} s after the others went on" if late else ""), None


def below(job: JobRecord) -> str:
    """Says why a job waits that has too few nodes."""
    return f"{len(job.hosts)} of {job.least} nodes"


def enough(job: JobRecord) -> bool:
    """True if there are nodes enough, with the newcomers that are ready."""
    ready = sum(part.ready and job.host_index(part.node_id) is None for part in job.joining)
    return len(job.hosts) + ready >= job.least


def _hold(job: JobRecord, reason: str) -> Regroup:
    return Regroup(job.hosts, (), job.joining, reason, plan=Plan.HOLD)


def _ready(job: JobRecord, now: float, options: Options) -> tuple[list[HostRecord], float | None]:
    """Returns (newcomers that may enter now, when those enter that wait for others of their wave)."""
    ready = [part for part in job.joining if part.ready]
    if not ready or len(ready) == len(job.joining):
        return ready, None
    at = min(part.since_clock for part in ready) + options.join_wait_s
    return (ready, None) if now >= at else ([], at)


def _leaving(job: JobRecord, nodes: Nodes) -> list[str]:
    """Nodes that leave; none if nobody would be left. Where the job would fall below its minimum they stay until
    others have come."""
    found = [host.node_id for host in job.hosts if draining(host, nodes)]
    staying = [host.node_id for host in job.hosts if host.node_id not in found]
    found += staying[job.wanted :]
    after = replace(job, hosts=tuple(host for host in job.hosts if host.node_id not in found))
    return found if after.hosts and enough(after) else []


def _room(job: JobRecord, nodes: Nodes, left: list[str], admitted: list[HostRecord]) -> int:
    """Returns how many of ``admitted`` fit: the job may have become smaller meanwhile."""
    room = job.wanted - sum(host.node_id not in left and not draining(host, nodes) for host in job.hosts)
    for count, part in enumerate(admitted):
        if job.host_index(part.node_id) is None:
            if room <= 0:
                return count
            room -= 1
    return len(admitted)


def _reason(job: JobRecord, step: Regroup, admitted: list[HostRecord], left: list[str]) -> str:
    words = []
    size = job.spec.island_size
    if admitted:
        ranks = sum(part.nranks for part in admitted)
        who = f"{islands.count(ranks, size)} {'joins' if ranks == size else 'join'}"
        words.append(f"{who} on {names([part.node_id for part in admitted])}")
    if left:
        words.append(f"{names(left)} {'leaves' if len(left) == 1 else 'leave'}")
    ranks = sum(host.nranks for host in step.hosts)
    text = "; ".join(words) or "it goes on"
    return f"generation {job.generation + 1}: {text}; {islands.count(ranks, size)} from the next step on"
