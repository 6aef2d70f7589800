"""Finds why a job has to stop, and says in words how ranks ended. Pure functions of facts and clock."""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bagua.base import islands
from bagua.daemon.coordinator.rules.domain import (
    HostRecord,
    JobRecord,
    JobState,
    NodeView,
    Phase,
    RankRecord,
    RankState,
)
from bagua.daemon.coordinator.rules.options import Options

Nodes = Mapping[str, NodeView]


@dataclass(frozen=True)
class Cause:
    outcome: JobState
    reason: str


def silent_since(host: HostRecord, nodes: Nodes, options: Options) -> float | None:
    """Returns when the node of ``host`` was heard of last; None while its session lives. The time before the start of
    this coordinator does not count.
    """
    node = nodes.get(host.node_id)
    if node is None:
        return options.started_clock
    if node.connected:
        return None
    return max(node.heard_clock, options.started_clock)


def find_cause(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Cause | None, float | None]:
    """Returns (why the job has to stop, None), or (None, when to look again: None if only a fact can change the
    answer). Of an elastic job that runs, or is being started, losses are left to ``membership``.
    """
    goes_on = job.spec.elastic and (job.state.under_way or job.state is JobState.STARTING)
    failed = [rank for host in job.hosts if host.failed for rank in host.failed]
    if goes_on:
        failed = [rank for rank in failed if not rank.newcomer]
        lost = any(host.withdrawn for host in job.hosts) or any(rank.signal for rank in failed)
        withdrawn = {host.node_id for host in job.hosts if host.withdrawn}
        failed = [rank for rank in failed if not rank.signal and rank.node_id not in withdrawn]
    else:
        lost = False
    over = all(rank.state is RankState.EXITED or rank.newcomer for host in job.hosts for rank in host.ranks)
    direct = [rank for rank in failed if not _follows(rank, job)]
    if direct:
        first = min(direct, key=lambda rank: (rank.exited_at or math.inf, rank.rank))  # 0: its node did not say when
        return Cause(JobState.FAILED, describe_exit(first, job.spec.island_size)), None
    if not failed and not lost and over:
        # Also with a node's error: it came too late to hurt any rank, and the events tell of it.
        return Cause(JobState.SUCCEEDED, f"{all_of(len(job.ranks), 'rank')} ended with exit code 0"), None
    wake: list[float] = []
    indirect = list(_indirect(job, failed))
    gone, silent = _lost_host(job, nodes, now, options) if indirect and not goes_on else (None, None)
    if gone is not None:
        return gone, None
    if silent is not None:
        wake.append(silent)
    elif indirect:
        since = min(seen for seen, _ in indirect)
        told = next(_told(job), None)
        patience_s = options.settle_s if told is None else options.told_s
        if now >= since + patience_s:
            words = indirect[0][1] if told is None else describe_exit(told, job.spec.island_size)
            return Cause(JobState.FAILED, words), None
        wake.append(since + patience_s)
    # Most nodes of a large job are there: those are passed over quickly.
    away = (
        host
        for host in job.hosts
        if host.phase is Phase.STOPPED or (node := nodes.get(host.node_id)) is None or not node.connected
    )
    for host in () if goes_on else away:
        if host.phase is Phase.STOPPED:
            if not host.error and not host.exited:
                return Cause(JobState.FAILED, f"node {host.node_id} stopped the job by itself"), None
            continue
        heard = silent_since(host, nodes, options)
        assert heard is not None  # else it is not away
        if now >= heard + options.lease_s:
            text = f"node {host.name} has not been heard of for {options.lease_s:g} s"
            return Cause(JobState.FAILED, text), None
        wake.append(heard + options.lease_s)
    return None, min(wake, default=None)


def _lost_host(job: JobRecord, nodes: Nodes, now: float, options: Options) -> tuple[Cause | None, float | None]:
    """Returns the cause if a host that another one has lost says nothing, or when to look again: its daemon, which is
    started again, knows why it was killed. (None, None): none is silent."""
    for witness in job.hosts:
        for name in witness.lost_hosts if witness.error else ():
            host, node = next((host for host in job.hosts if host.node_id == name), None), nodes.get(name)
            if host is None or node is None or host.error or host.phase is Phase.STOPPED or not node.heard_clock:
                continue
            if node.connected and node.heard_clock > witness.error_clock:
                continue  # it lives: the connection broke
            gone = not node.connected and node.hung_up
            at = witness.error_clock + (options.settle_s if gone else options.lease_s)
            if now < at:
                return None, at
            how = "is gone: its session ended" if gone else "is silent"
            return Cause(JobState.FAILED, f"node {host.name} {how}, and node {witness.node_id} has lost it"), None
    return None, None


def _follows(rank: RankRecord, job: JobRecord) -> bool:
    """True if the rank most likely failed because something else had failed before."""
    if rank.signal == signals.SIGTERM:  # a daemon ends its ranks so after an error
        return any(host.error for host in job.hosts if host.node_id == rank.node_id)
    return rank.follows


def _told(job: JobRecord) -> Iterator[RankRecord]:
    """Ranks that have told why their programs end, before anything else had failed, and whose processes live yet."""
    for host in job.hosts:
        for rank in host.ranks:
            if rank.reason and not rank.follows and not rank.newcomer and rank.state is RankState.RUNNING:
                yield rank


def _indirect(job: JobRecord, failed: list[RankRecord]) -> Iterator[tuple[float, str]]:
    """Yields (when seen, text) of errors that may have a better cause, the clearest first."""
    alone = job.spec.elastic
    reported = [host for host in job.hosts if host.error and not (alone and (host.withdrawn or host.new))]
    # A host that could not go on by itself is why others have failed.
    reported.sort(key=lambda host: (not host.withdrawn, host.error_clock, host.index))
    for host in reported:
        # An error at launch, or of a node that is done with the job, has no better cause to wait for.
        final = host.phase in (Phase.PREPARING, Phase.STOPPED)
        yield (-math.inf if final else host.error_clock), host.error_text
    for rank in sorted(failed, key=lambda rank: (rank.seen_exited_clock, rank.rank)):
        yield rank.seen_exited_clock, describe_exit(rank, job.spec.island_size)


def describe_exit(rank: RankRecord, island_size: int) -> str:
    """Describes in words how a rank ended, and why, if it failed. Newcomers are counted on their node alone, and in no
    island yet."""
    member = f" (member {rank.number})" if rank.number != rank.rank else ""
    where = f"{islands.rank_name(rank.rank, 1 if rank.newcomer else island_size)}{member} on node {rank.node_id}"
    if rank.state is not RankState.EXITED:
        return f"{where} has failed: {rank.reason}"
    if rank.signal:
        try:
            name = signals.Signals(rank.signal).name
        except ValueError:
            name = f"signal {rank.signal}"
        why = f". {rank.reason}" if rank.reason else ""
        return f"{where} was killed by {name}{why}"
    detail = f": {rank.reason}" if rank.reason and rank.exit_code else ""
    return f"{where} exited with code {rank.exit_code}{detail}"


def all_of(number: int, noun: str) -> str:
    """``1 rank``, ``all 4 ranks``."""
    return f"1 {noun}" if number == 1 else f"all {number} {noun}s"
