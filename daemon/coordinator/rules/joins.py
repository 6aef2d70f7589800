"""Starts newcomers of an elastic job, and gives up those that fail: pure functions of facts and clock.

Newcomers come in waves, one at a time. They run their script up to its first step while the others train on; nothing
that happens to them hurts the job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from bagua.base import islands
from bagua.base.end_reasons import SPENT
from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, NodeView, Phase, RankRecord, RankState
from bagua.daemon.coordinator.rules.evidence import accusers, ending, host_loss
from bagua.daemon.coordinator.rules.failure_reasons import Nodes, describe_exit
from bagua.daemon.coordinator.rules.generations import Numbers, with_former
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.placement import names, releases

_HOUR_S = 3_600.0


@dataclass(frozen=True)
class Wave:
    """A change beside the current generation: newcomers are started, or given up. ``job``: afterwards."""

    job: JobRecord
    kind: str  # of the event
    reason: str  # empty: no event tells of it


def give_up(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Wave | None, float | None]:
    """Returns (newcomers that have failed, None), or (None, when to look again)."""
    surplus = _surplus(job, nodes)
    if surplus:
        text = f"{names([part.node_id for part in surplus])} need not join any more"
        return Wave(without(job, {part.index for part in surplus}), "newcomers_lost", text), None
    failed: dict[int, str] = {}
    wake: list[float] = []
    for part in job.joining:
        words, at = _failure(job, part, nodes, now, options)
        if words:
            failed[part.index] = words
        elif at is not None:
            wake.append(at)
    if not failed:
        return None, min(wake, default=None)
    parts = [part for part in job.joining if part.index in failed]
    if all(any(rank.reason == SPENT for rank in part.ranks) for part in parts):  # a member was lost: no fault of theirs
        words = f"newcomers can't go back: {'; '.join(failed.values())}; others are started"
        return Wave(without(job, failed.keys()), "newcomers_lost", words), None
    # 30: a float has no room for the power of a thousand.
    pause = min(options.rejoin_s * 2.0 ** min(job.failures, 30), options.most_rejoin_s)
    reason = f"newcomers are given up: {'; '.join(failed.values())}; others are started in {pause:g} s at the earliest"
    after = replace(without(job, failed.keys()), failures=job.failures + 1, retry_clock=now + pause)
    return Wave(after, "newcomers_lost", reason), None


def without(job: JobRecord, indices: Collection[int]) -> JobRecord:
    """``job`` without these parts that prepare to join."""
    gone = [part for part in job.joining if part.index in indices]
    return replace(
        job,
        joining=tuple(part for part in job.joining if part not in gone),
        former=with_former(job, [replace(part, joining=False, since_clock=0.0) for part in gone]),
    )


def start_newcomers(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Wave | None, float | None]:
    """Returns (the next newcomers, None), or (None, when to look again)."""
    if hindrance(job):
        return None, None
    rows = _wanted(job, nodes, now)
    if not rows:
        later = (_respawn_at(job, now), _mended_at(job, nodes, now))
        return None, min((at for at in later if at is not None), default=None)
    if now < job.retry_clock:
        return None, job.retry_clock
    numbers = Numbers(job)
    first = max(job.next_member, 1 + max(rank.number for part in job.parts for rank in part.ranks))
    member = first
    parts: list[HostRecord] = []
    for node, count in rows:
        parts.append(_part(node, count, member, numbers.next(), now))
        member += count
    at_home = {host.node_id for host in job.hosts}
    again = tuple((part.node_id, now) for part in parts if part.node_id in at_home for _ in part.ranks)
    recent = tuple((node_id, at) for node_id, at in job.respawns if now < at + _HOUR_S)
    after = replace(job, joining=(*job.joining, *parts), next_member=member, respawns=(*recent, *again))
    ranks, size = member - first, job.spec.island_size
    who = f"{islands.count(ranks, size, 'newcomer')} {'prepares' if ranks == size else 'prepare'}"
    return Wave(after, "newcomers", f"{who} to join on {names([part.node_id for part in parts])}"), None


def hindrance(job: JobRecord) -> str:
    """Says why nobody may be started now, in words; empty: nothing stands in the way."""
    if job.joining or any(host.has_newcomers for host in job.hosts):
        return "others are joining"
    if not any(host.takes_newcomers for host in job.hosts):
        return "its program has not said that it takes newcomers (ElasticSampler.epochs() and wait_to_join() say so)"
    if job.paused:
        return "it is paused"
    if not job.state.under_way or ending(job):
        return "it is about to end"
    return ""


def growth(job: JobRecord, nodes: Nodes, now: float) -> str:
    """Says why a job that has less than it may have gets nobody now, in words; empty: it has, or gets, all."""
    if not job.spec.elastic or not job.state.under_way or job.joining:
        return ""
    staying = [host for host in job.hosts if not draining(host, nodes)]
    short = [host for host in staying if job.spec.respawn and _running(host) < job.spec.nproc_per_node]
    if len(staying) >= job.wanted and not short:
        return ""
    words = hindrance(job)
    if words:
        return words
    if not _wanted(job, nodes, now):
        per_node = job.spec.nproc_per_node
        slots = "1 free slot" if per_node == 1 else f"{per_node} free slots"
        if len(staying) >= job.wanted:
            return "its ranks were replaced too often"
        if (at := _mended_at(job, nodes, now)) is not None:
            away = names([name for name, node in nodes.items() if _away_until(job, node) > now])
            return f"{away} was put out: tried again in {at - now:.0f} s, or when its daemon restarts"
        if strangers := _free(job, nodes, now):
            own = releases(nodes[host.node_id] for host in job.hosts if host.node_id in nodes)
            return f"no node with {slots} can talk with its ranks ({own}): {releases(strangers)}"
        return f"no other node has {slots}"
    if now < job.retry_clock:
        return f"newcomers have failed; the next ones are started in {job.retry_clock - now:.0f} s"
    return ""


def draining(host: HostRecord, nodes: Nodes) -> bool:
    """True if the host is to leave its jobs."""
    node = nodes.get(host.node_id)
    return node is not None and node.draining


def _surplus(job: JobRecord, nodes: Nodes) -> list[HostRecord]:
    """Newcomers for which there is no room any more: the job became smaller meanwhile."""
    new = [part for part in job.joining if job.host_index(part.node_id) is None]
    staying = sum(not draining(host, nodes) for host in job.hosts)
    return new[max(0, job.wanted - staying) :]


def _failure(job: JobRecord, part: HostRecord, nodes: Nodes, now: float, options: Options) -> tuple[str, float | None]:
    """Returns (why a part is given up, None), or (empty, when to look again)."""
    ended = next((rank for rank in part.ranks if rank.state is RankState.EXITED), None)
    if ended is not None:
        return describe_exit(ended, job.spec.island_size), None
    if job.host_index(part.node_id) is None:
        words, at = host_loss(job, part, accusers(job, nodes, options).get(part.node_id), nodes, now, options)
        if words:
            return words, None
        if part.error:
            return part.error_text, None
    else:
        at = None  # what happens to the node happens to the host there
    node = nodes.get(part.node_id)
    if node is not None and node.draining:
        return f"node {part.name} drains", None
    if part.ready:
        return "", at
    late = part.since_clock + options.join_s
    if now >= late:
        return f"the newcomers on node {part.name} were not ready within {options.join_s:g} s", None
    return "", late if at is None else min(at, late)


def _wanted(job: JobRecord, nodes: Nodes, now: float) -> list[tuple[NodeView, int]]:
    """Returns (node, number of newcomers) for all that could be started now."""
    per_node = job.spec.nproc_per_node
    found: list[tuple[NodeView, int]] = []
    staying = [host for host in job.hosts if not draining(host, nodes)]
    if job.spec.respawn:
        begun = Counter(node_id for node_id, at in job.respawns if now < at + _HOUR_S)
        for host in staying:
            node = nodes.get(host.node_id)
            if node is None or not node.open or node.boot_id != host.boot_id or job.other_parts(host.node_id):
                continue
            count = min(per_node - _running(host), job.spec.respawn - begun[host.node_id], node.free)
            count -= count % job.spec.island_size
            if count > 0:
                found.append((node, count))
    missing = job.wanted - len(staying)
    if missing > 0:
        spoken = {nodes[host.node_id].wire_version for host in job.hosts if host.node_id in nodes}
        fit = [node for node in _free(job, nodes, now) if spoken <= {node.wire_version}]  # all members speak the same
        found += [(node, per_node) for node in fit[:missing]]
    return found


def _free(job: JobRecord, nodes: Nodes, now: float) -> list[NodeView]:
    """Nodes that have room for newcomers and nothing of the job, by node_id."""
    busy = {part.node_id for part in job.hosts} | {
        part.node_id for part in job.former if part.phase is not Phase.STOPPED
    }
    per_node = job.spec.nproc_per_node
    fit = [node for node in nodes.values() if node.open and node.free >= per_node and node.node_id not in busy]
    return sorted((node for node in fit if _away_until(job, node) <= now), key=lambda node: node.node_id)


def _respawn_at(job: JobRecord, now: float) -> float | None:
    """Returns when the oldest replacement is forgotten."""
    ends = [at + _HOUR_S for _, at in job.respawns if now < at + _HOUR_S]
    return min(ends, default=None)


def _away_until(job: JobRecord, node: NodeView) -> float:
    """Returns when a node may join again that was put out; one whose daemon was started anew at once."""
    entries = [(boot_id, until) for node_id, boot_id, until in job.put_out if node_id == node.node_id]
    boot_id, until = entries[-1] if entries else ("", 0.0)
    return until if boot_id == node.boot_id else 0.0


def _mended_at(job: JobRecord, nodes: Nodes, now: float) -> float | None:
    """Returns when the first of them may join again."""
    if not job.put_out:
        return None
    times = (_away_until(job, node) for node in nodes.values() if node.open)
    return min((at for at in times if at > now), default=None)


def _running(host: HostRecord) -> int:
    return sum(rank.state is not RankState.EXITED for rank in host.ranks)


def _part(node: NodeView, count: int, member: int, index: int, now: float) -> HostRecord:
    ranks = [RankRecord(local, local, node.node_id, member=member + local, newcomer=True) for local in range(count)]
    return replace(node.host(index, ranks), joining=True, since_clock=now)
