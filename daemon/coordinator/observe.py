"""Merges a node's report into a job's record: pure and idempotent. Nothing goes backwards, the first error stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bagua.daemon.coordinator.causes import describe_exit
from bagua.daemon.coordinator.domain import (
    Event,
    HostRecord,
    JobRecord,
    JobState,
    LocalJob,
    LocalRank,
    Phase,
    RankRecord,
    RankState,
)

MAX_ERROR = 2_000  # characters kept of a node's error
MAX_TAIL = 8_000  # characters kept of a failed rank's last lines
MAX_TAILS = 32  # failed ranks of a job whose last lines are kept in full
MAX_PATH = 4_096
MAX_EXITS = 16  # bad ends that get an event each, of those that a node reports at once
RESTARTED = "the daemon of node {} was restarted"


Changed = tuple[JobRecord, tuple[Event, ...]]


def observe(job: JobRecord, node_id: str, boot_id: str, fact: LocalJob, now: float, wall: float) -> Changed:
    """``job`` with ``fact`` of node ``node_id`` taken in, and events to record. ``now`` by the service clock, ``wall``
    for people. Facts of a later generation, or of a node that is not in the job, change nothing. In an elastic job a
    fact of an older generation tells of members, and is right in this one, but for what it says of the engine. A
    daemon with another ``boot_id`` than the one that got the job has lost it. Costs what the node's own ranks cost,
    however many hosts the job has."""
    index = job.host_index(node_id)
    if index is None:
        return _observe_former(job, node_id, boot_id, fact, now, wall)
    if fact.generation != job.generation:
        if fact.generation > job.generation or not job.spec.elastic:
            return job, ()
        fact = replace(fact, suspended="", suspended_hosts=(), waiting="")
    old = job.hosts[index]
    if old.boot_id != boot_id and _needed(job) and old.phase is not Phase.STOPPED:
        fact = replace(fact, error=fact.error or RESTARTED.format(node_id), withdrawn=True)
    host, started, exited = _merge_ranks(job, _merge_host(old, fact, now), fact.ranks, now)
    if host == old:
        return job, ()
    job = replace(job, hosts=(*job.hosts[:index], host, *job.hosts[index + 1 :]))
    return job, tuple(_events(job, old, host, started, exited, wall))


def _observe_former(job: JobRecord, node_id: str, boot_id: str, fact: LocalJob, now: float, wall: float) -> Changed:
    """A node that is out of the job tells, in whichever generation, how its part ends. Another run of its daemon has
    nothing of it."""
    old = job.former_part(node_id)
    if old is None:
        return job, ()
    if old.boot_id != boot_id:
        fact = replace(fact, phase=Phase.STOPPED)
    phase = max(old.phase, fact.phase)
    host, _, exited = _merge_ranks(job, replace(old, phase=phase), fact.ranks, now)
    if host == old:
        return job, ()
    job = replace(job, former=tuple(host if part is old else part for part in job.former))
    return job, tuple(_events(job, old, host, [], exited, wall))


def forget(job: JobRecord, node_id: str, boot_id: str, now: float, wall: float) -> Changed:
    """``job`` after the daemon ``boot_id`` of its node said that it holds nothing of it: whatever ran there is gone. A
    job of which the node has not said anything yet stays as it is: it will be sent (again)."""
    index = job.host_index(node_id)
    host = job.former_part(node_id) if index is None else job.hosts[index]
    if host is None or host.phase is Phase.STOPPED:
        return job, ()
    if _needed(job) and host.boot_id == boot_id and host.phase is Phase.UNKNOWN:
        return job, ()
    return observe(job, node_id, boot_id, LocalJob(job.job_id, job.generation, Phase.STOPPED), now, wall)


def _needed(job: JobRecord) -> bool:
    return job.state in (JobState.STARTING, JobState.RUNNING)


def _merge_host(host: HostRecord, fact: LocalJob, now: float) -> HostRecord:
    phase = max(host.phase, fact.phase)
    error, error_clock = host.error, host.error_clock
    if fact.error and not error:
        error, error_clock = fact.error[:MAX_ERROR], now
    lost_hosts = host.lost_hosts
    if fact.suspended_hosts:
        lost_hosts = tuple(sorted({*lost_hosts, *fact.suspended_hosts}))
    suspended, suspended_clock = host.suspended, host.suspended_clock
    if fact.suspended and not suspended:
        suspended, suspended_clock = fact.suspended[:MAX_ERROR], now
    return replace(
        host,
        phase=phase,
        suspended=suspended,
        suspended_clock=suspended_clock,
        lost_hosts=lost_hosts,
        withdrawn=host.withdrawn or fact.withdrawn,
        engine_address=host.engine_address or fact.engine_address[:MAX_ERROR],
        error=error,
        error_clock=error_clock,
        waiting="" if phase is Phase.STOPPED else fact.waiting[:MAX_ERROR],
    )


def _merge_ranks(
    job: JobRecord, host: HostRecord, facts: Sequence[LocalRank], now: float
) -> tuple[HostRecord, list[RankRecord], list[RankRecord]]:
    """(the host, ranks that now run or ran, ranks that now are over)."""
    tails = sum(len(one.failed) for one in job.hosts) if any(fact.error_tail for fact in facts) else 0
    ranks = list(host.ranks)
    started: list[RankRecord] = []
    exited: list[RankRecord] = []
    changed = False
    # Members keep their number, so what is said of them is right in every generation.
    places = {rank.number: local for local, rank in enumerate(ranks)} if job.spec.elastic and facts else None
    for fact in facts:
        local = fact.rank - host.first_rank if places is None else places.get(fact.member, -1)
        if not 0 <= local < host.nranks:
            continue
        old = ranks[local]
        new = _merge_rank(old, fact, now, full_tail=tails < MAX_TAILS)
        if new == old:
            continue
        ranks[local] = new
        changed = True
        if old.state is RankState.WAITING and new.state is not RankState.WAITING:
            started.append(new)
        if old.state is not RankState.EXITED and new.state is RankState.EXITED:
            exited.append(new)
            tails += bool(new.error_tail)
    return (replace(host, ranks=tuple(ranks)) if changed else host), started, exited


def _merge_rank(rank: RankRecord, fact: LocalRank, now: float, full_tail: bool) -> RankRecord:
    if rank.state is RankState.EXITED or fact.state < rank.state:
        return rank
    rank = replace(rank, state=fact.state, pid=fact.pid, log_path=fact.log_path[:MAX_PATH], left=rank.left or fact.left)
    if fact.state is not RankState.EXITED:
        return rank
    tail = fact.error_tail[-MAX_TAIL:] if full_tail else fact.error_tail.rstrip().rpartition("\n")[2][-500:]
    return replace(
        rank,
        exit_code=fact.exit_code,
        signal=fact.signal,
        error_tail=tail,
        exited_at=fact.exited_at,
        seen_exited_clock=now,
        follows=fact.follows,
    )


def _events(
    job: JobRecord, old: HostRecord, host: HostRecord, started: list[RankRecord], exited: list[RankRecord], wall: float
) -> Iterable[Event]:
    def event(kind: str, reason: str) -> Event:
        return Event(kind, reason, job.generation, wall)

    if host.engine_address and not old.engine_address:
        yield event("engine_ready", f"the engine of node {host.node_id} listens on {host.engine_address}")
    if started:
        yield event("rank_started", f"{rank_list([rank.rank for rank in started])} on node {host.node_id} started")
    well = [rank.rank for rank in exited if not rank.failed]
    if well:
        yield event("rank_exited", f"{rank_list(well)} on node {host.node_id} exited with code 0")
    badly = [rank for rank in exited if rank.failed]
    for rank in badly[:MAX_EXITS]:
        yield event("rank_exited", describe_exit(rank))
    if badly[MAX_EXITS:]:
        rest = rank_list([rank.rank for rank in badly[MAX_EXITS:]])
        yield event("rank_exited", f"{rest} on node {host.node_id} did not end well either")
    if host.error and not old.error:
        yield event("node_error", host.error_text)
    if host.suspended and not old.suspended:
        yield event("suspended", f"node {host.name}: {host.suspended}")
    if host.waiting and not old.waiting:
        yield event("waiting", host.waiting)
    if host.phase is Phase.STOPPED and old.phase is not Phase.STOPPED:
        yield event("node_stopped", f"nothing of the job is left on node {host.node_id}")


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank {parts[0]}" if single else f"ranks {', '.join(parts)}"
