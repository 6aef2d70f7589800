"""Decides who is out of an elastic job, and forms its next generation: pure functions of facts and clock.

A generation consists of members of the last one, in their order, with ranks counted anew. The hosts themselves see to
it that a step commits everywhere or nowhere; nothing here knows of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bagua.daemon.coordinator.causes import Cause, Nodes, describe_exit, silent_since
from bagua.daemon.coordinator.domain import HostRecord, JobRecord, JobState, Options, Phase, RankRecord, RankState

_SHOWN = 3  # losses that are named in one sentence


@dataclass(frozen=True)
class Regroup:
    """The next generation. ``out``: parts of the last one that are not in it."""

    hosts: tuple[HostRecord, ...]
    out: tuple[HostRecord, ...]
    reason: str
    stalls: int = 0


Step = Regroup | Cause | None


def next_generation(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Step, float | None]:
    """(the next generation, or why the job has to stop, None), or (None, when to look again). ``job`` is elastic and
    RUNNING. One in which something has failed by itself gets none: it has to stop, as ``causes`` will say."""
    if any(_failed(host) for host in job.hosts):
        return None, None
    lost: dict[int, str] = {}  # index of a host -> why it is out
    wake: list[float] = []
    for host in job.hosts:
        words, at = _host_loss(job, host, nodes, now, options)
        if words:
            lost[host.index] = words
        elif at is not None:
            wake.append(at)
    dead = [rank for host in job.hosts if host.index not in lost and host.failed for rank in host.failed]
    if (lost or dead or any(host.suspended for host in job.hosts)) and _leaving(job, lost):
        return None, min(wake, default=None)  # they can't be members, and the job must not end while they do
    if lost or dead:
        losses = [lost[index] for index in sorted(lost)] + [describe_exit(rank) for rank in dead]
        return _without(job, lost.keys(), _sentence(losses), options), None
    if any(host.suspended for host in job.hosts):
        return _again(job, now, options, wake)
    return None, min(wake, default=None)


def regrouped(job: JobRecord, step: Regroup, now: float) -> JobRecord:
    """``job`` in its next generation."""
    return replace(
        job,
        generation=job.generation + 1,
        hosts=step.hosts,
        former=(*job.former, *step.out),
        stalls=step.stalls,
        placed_clock=now,
        master_addr=step.hosts[0].address,
    )


# ---- evidence


def _failed(host: HostRecord) -> bool:
    """True if an error of its engine or an exception of a rank will end the job."""
    return not host.withdrawn and (bool(host.error) or any(not rank.signal for rank in host.failed))


def _host_loss(
    job: JobRecord, host: HostRecord, nodes: Nodes, now: float, options: Options
) -> tuple[str, float | None]:
    """(why the whole host is out, None), or (empty, when to look again)."""
    if host.withdrawn:
        return host.error_text, None
    if host.phase is Phase.STOPPED:
        return ("" if host.exited else f"node {host.name} has nothing left of the job"), None
    heard = silent_since(host, nodes, options)
    if heard is None:
        return "", None
    if now >= heard + options.lease_s:
        return f"node {host.name} has not been heard of for {options.lease_s:g} s", None
    node = nodes.get(host.node_id)
    if node is not None and node.hung_up:
        witness = next((other for other in job.hosts if _saw_break(other, host, nodes, options)), None)
        if witness is not None:
            return f"node {host.name} is gone: its session ended, and node {witness.node_id} has lost it, too", None
    return "", heard + options.lease_s


def _leaving(job: JobRecord, lost: Iterable[int]) -> bool:
    """True if a rank has taken leave in good order, and its process has not ended yet."""
    there = (host for host in job.hosts if host.index not in lost)
    return any(rank.left and rank.state is not RankState.EXITED for host in there for rank in host.ranks)


def _saw_break(witness: HostRecord, host: HostRecord, nodes: Nodes, options: Options) -> bool:
    """True if the engine of ``witness``, of which the coordinator hears, has lost ``host``."""
    return host.index in witness.lost_hosts and silent_since(witness, nodes, options) is None


# ---- the next generation


def _without(job: JobRecord, lost: Iterable[int], words: str, options: Options) -> Step:
    """All members that run, but for the hosts in ``lost``."""
    step = _form(job, frozenset(lost))
    if not step.hosts:
        return Cause(JobState.FAILED, f"{words}; no rank is left that runs")  # also if others had ended with code 0
    least = job.spec.min_nodes
    if len(step.hosts) < least:
        left = "1 node is left" if len(step.hosts) == 1 else f"{len(step.hosts)} nodes are left"
        return Cause(JobState.FAILED, f"{words}; {left}, and the job needs at least {least}")
    return replace(step, reason=_reason(job, words, step))


def _again(job: JobRecord, now: float, options: Options, wake: Sequence[float]) -> tuple[Step, float | None]:
    """A connection broke, but nobody is known to be lost: the same members once more, after a moment. A host that
    others have lost and that has not spoken since gets the time of a lease to do so."""
    suspended = [host for host in job.hosts if host.suspended]
    accused = {index for host in suspended for index in host.lost_hosts if index < len(job.hosts)}
    alive = all(job.hosts[index].suspended for index in accused)
    first = min(suspended, key=lambda host: (host.suspended_clock, host.index))
    at = first.suspended_clock + (options.regroup_s if alive else options.lease_s)
    if wake:  # a node is away: it comes back, or is lost
        return None, min(wake)
    if now < at:
        return None, at
    soon = now < job.placed_clock + options.stall_s
    stalls = job.stalls + 1 if soon else 1
    words = f"node {first.name}: {first.suspended}"
    if stalls > options.max_stalls:
        text = f"the connections broke {stalls} times in a row, though no member is lost; the last time: {words}"
        return Cause(JobState.FAILED, text), None
    step = _form(job, frozenset())
    if not step.hosts:  # whoever was there has ended well
        return None, None
    return replace(step, reason=_reason(job, words, step), stalls=stalls), None


def _form(job: JobRecord, lost: frozenset[int]) -> Regroup:
    hosts: list[HostRecord] = []
    out: list[HostRecord] = []
    first = 0
    for host in job.hosts:
        staying = [] if host.index in lost or host.phase is Phase.STOPPED else _running(host)
        if not staying:
            out.append(replace(host, last_generation=job.generation, ranks=_numbered(host.ranks)))
            continue
        out += [_dead_part(job, host, rank) for rank in host.ranks if rank.state is RankState.EXITED]
        hosts.append(
            replace(
                host,
                index=len(hosts),
                first_rank=first,
                nranks=len(staying),
                waiting="",
                suspended="",
                suspended_clock=0.0,
                lost_hosts=(),
                ranks=tuple(
                    replace(rank, rank=first + local, local_rank=local, member=rank.number)
                    for local, rank in enumerate(staying)
                ),
            )
        )
        first += len(staying)
    numbered = [replace(host, index=-1 - len(job.former) - number) for number, host in enumerate(out)]
    return Regroup(tuple(hosts), tuple(numbered), "")


def _running(host: HostRecord) -> list[RankRecord]:
    return [rank for rank in host.ranks if rank.state is not RankState.EXITED]


def _numbered(ranks: Iterable[RankRecord]) -> tuple[RankRecord, ...]:
    return tuple(replace(rank, member=rank.number) for rank in ranks)


def _dead_part(job: JobRecord, host: HostRecord, rank: RankRecord) -> HostRecord:
    """The part of one rank that has ended, on a host that goes on: nothing of it is left there."""
    return HostRecord(
        index=-1,
        node_id=host.node_id,
        hostname=host.hostname,
        address=host.address,
        boot_id=host.boot_id,
        first_rank=rank.rank,
        nranks=1,
        phase=Phase.STOPPED,
        last_generation=job.generation,
        ranks=(replace(rank, local_rank=0, member=rank.number),),
    )


# ---- words


def _sentence(losses: Sequence[str]) -> str:
    more = f" and {len(losses) - _SHOWN} more" if len(losses) > _SHOWN else ""
    return f"{'; '.join(loss.rstrip('.') for loss in losses[:_SHOWN])}{more}"


def _reason(job: JobRecord, words: str, step: Regroup) -> str:
    left = sum(host.nranks for host in step.hosts)
    return f"generation {job.generation + 1}: {words}; {_count(left, 'rank')} {'goes' if left == 1 else 'go'} on"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
