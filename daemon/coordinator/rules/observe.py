"""Merges a node's report into a job's record: pure and idempotent. Nothing goes backwards, the first error stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bagua.daemon.coordinator.rules.domain import (
    Event,
    HostRecord,
    JobRecord,
    JobState,
    LocalJob,
    LocalRank,
    Phase,
    Plan,
    RankRecord,
    RankState,
)
from bagua.daemon.coordinator.rules.evidence import passed
from bagua.daemon.coordinator.rules.failure_reasons import describe_exit

MAX_ERROR = 2_000  # characters kept of a node's error
MAX_REASON = 2_100  # characters kept of why a rank failed
SHORT_REASON = 200  # the same where thousands have failed
MAX_TAIL = 8_000  # characters kept of a failed rank's last lines
MAX_TAILS = 32  # failed ranks of a job whose last lines are kept in full
MAX_PATH = 4_096
MAX_EXITS = 16  # bad ends that get an event each, of those that a node reports at once
RESTARTED = "the daemon of node {} was restarted"


Changed = tuple[JobRecord, tuple[Event, ...]]


def observe(job: JobRecord, node_id: str, boot_id: str, fact: LocalJob, now: float, wall: float) -> Changed:
    """``job`` with ``fact`` of node ``node_id`` taken in, and events to record. ``now`` by the service clock, ``wall``
    for people. Facts of a later generation, or of a node that is not in the job, change nothing. In an elastic job a
    fact of an older generation tells of members, and is right in this one, but for what it says of an engine that has
    left that generation at once. A daemon with another ``boot_id`` than the one that got the job has lost it. Costs
    what the node's own ranks cost, however many hosts the job has."""
    index = job.host_index(node_id)
    events: tuple[Event, ...] = ()
    if index is not None:
        job, events = _observe_host(job, index, boot_id, fact, now, wall)
    for part in job.other_parts(node_id):
        job, more = _observe_part(job, part, index is not None, boot_id, fact, now, wall)
        events += more
    return job, events


def _observe_host(job: JobRecord, index: int, boot_id: str, fact: LocalJob, now: float, wall: float) -> Changed:
    old = job.hosts[index]
    if fact.generation != job.generation:
        if fact.generation > job.generation or not job.spec.elastic:
            return job, ()
        fact = replace(fact, waiting="")
        if job.plan is Plan.AT_ONCE:
            fact = replace(fact, suspended="", suspended_hosts=(), suspended_nodes=(), accused=())
    elif fact.suspended_hosts and not fact.suspended_nodes and fact.entered in (0, job.generation):
        names = tuple(job.hosts[at].node_id for at in fact.suspended_hosts if at < len(job.hosts))
        fact = replace(fact, suspended_nodes=names)
    if old.boot_id != boot_id and _needed(job) and old.phase is not Phase.STOPPED:
        fact = replace(fact, error=fact.error or RESTARTED.format(old.node_id), withdrawn=True)
    host, started, exited = _merge_ranks(job, _merge_host(old, fact, now), fact.ranks, now)
    job, events = _with_patience(job, old, fact, wall)
    if fact.passes > job.passes:
        job = replace(job, passes=fact.passes)
    if host.entered == job.generation and not passed(job):  # the next pass is the first one with newcomers
        job = replace(job, stalled_passes=job.passes + 1)
    if host == old:
        return job, events
    hosts = list(job.hosts)
    hosts[index] = host
    job = replace(job, hosts=tuple(hosts))
    if old.new and not host.new:
        job = replace(job, failures=0)
    return job, (*events, *_events(job, old, host, started, exited, wall))


def _with_patience(job: JobRecord, host: HostRecord, fact: LocalJob, wall: float) -> Changed:
    if fact.patience_s <= job.patience_s or not (job.spec.elastic and job.state.under_way):
        return job, ()
    text = f"eight steps take up to {fact.patience_s:g} s on node {host.name}: so long a host may say nothing"
    event = Event("patience", text, job.generation, wall)
    return replace(job, patience_s=fact.patience_s), (event,)


def _observe_part(
    job: JobRecord, old: HostRecord, beside: bool, boot_id: str, fact: LocalJob, now: float, wall: float
) -> Changed:
    """A part that is out tells, in whichever generation, how it ends; one that joins, how it gets ready. Another run of
    the daemon has nothing of it. ``beside``: its node has a part in the job, too, and this one consists of ranks
    alone."""
    if old.joining and fact.ranks and not _named(old, fact) and job.state.under_way:
        return job, ()  # the fact is older than this part
    if old.boot_id != boot_id:
        fact = replace(fact, phase=Phase.STOPPED, error=fact.error or RESTARTED.format(old.node_id), withdrawn=True)
    if beside and not old.joining and not _named(old, fact):  # the node has ended them, and speaks of them no more
        fact = replace(fact, phase=Phase.STOPPED)
    if old.joining and not beside:
        host = _merge_host(old, replace(fact, suspended="", suspended_nodes=(), accused=(), entered=0), now)
    else:
        host = replace(old, phase=max(old.phase, fact.phase))
    host, started, exited = _merge_ranks(job, host, fact.ranks, now)
    if beside and fact.phase is not Phase.STOPPED:
        host = replace(host, phase=Phase.STOPPED if host.exited else old.phase)
    if host.joining and host.ready and not old.ready:
        host = replace(host, since_clock=now)
    if host == old:
        return job, ()
    parts = tuple(host if part is old else part for part in (job.joining if old.joining else job.former))
    job = replace(job, joining=parts) if old.joining else replace(job, former=parts)
    return job, tuple(_events(job, old, host, started, exited, wall))


def _named(part: HostRecord, fact: LocalJob) -> bool:
    """True if the fact tells of a rank of this part."""
    numbers = {rank.number for rank in part.ranks}
    return any(rank.member in numbers for rank in fact.ranks)


def forget(job: JobRecord, node_id: str, boot_id: str, now: float, wall: float) -> Changed:
    """``job`` after the daemon ``boot_id`` of its node said that it holds nothing of it: whatever ran there is gone. A
    job of which the node has not said anything yet stays as it is: it will be sent (again)."""
    index = job.host_index(node_id)
    parts = [*job.other_parts(node_id), *(() if index is None else (job.hosts[index],))]
    left = [part for part in parts if part.phase is not Phase.STOPPED]
    if all(_needed(job) and part.boot_id == boot_id and part.phase is Phase.UNKNOWN for part in left):
        return job, ()
    return observe(job, node_id, boot_id, LocalJob(job.job_id, job.generation, Phase.STOPPED), now, wall)


def _needed(job: JobRecord) -> bool:
    return job.state is JobState.STARTING or job.state.under_way


def _merge_host(host: HostRecord, fact: LocalJob, now: float) -> HostRecord:
    phase = max(host.phase, fact.phase)  # a late fact takes nothing back
    error, error_clock = host.error, host.error_clock
    if fact.error and not error:
        error, error_clock = fact.error[:MAX_ERROR], now
    lost_hosts, accused = host.lost_hosts, host.accused
    suspended, suspended_clock = host.suspended, host.suspended_clock
    if fact.entered > host.entered:  # what was said of the generation before is over
        lost_hosts, accused, suspended, suspended_clock = (), (), "", 0.0
    if fact.suspended_nodes and fact.entered >= host.entered:
        lost_hosts = tuple(sorted({*lost_hosts, *fact.suspended_nodes}))
    if fact.accused and fact.entered >= host.entered:
        accused = tuple(sorted({*accused, *fact.accused}))
    if fact.suspended and not suspended and fact.entered >= host.entered:
        suspended, suspended_clock = fact.suspended[:MAX_ERROR], now
    return replace(
        host,
        phase=phase,
        suspended=suspended,
        suspended_clock=suspended_clock,
        lost_hosts=lost_hosts,
        accused=accused,
        withdrawn=host.withdrawn or fact.withdrawn,
        entered=max(host.entered, fact.entered),
        takes_newcomers=host.takes_newcomers or fact.takes_newcomers,
        engine_address=fact.engine_address[:MAX_ERROR] or host.engine_address,  # a daemon started again has another
        error=error,
        error_clock=error_clock,
        waiting="" if phase is Phase.STOPPED else fact.waiting[:MAX_ERROR],
    )


def _merge_ranks(
    job: JobRecord, host: HostRecord, facts: Sequence[LocalRank], now: float
) -> tuple[HostRecord, list[RankRecord], list[RankRecord]]:
    """Returns (the host, ranks that now run or ran, ranks that now are over)."""
    tails = sum(len(one.failed) for one in job.parts) if any(fact.error_tail for fact in facts) else 0
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
    rank = replace(
        rank,
        state=fact.state,
        pid=fact.pid,
        log_path=fact.log_path[:MAX_PATH],
        left=rank.left or fact.left,
        newcomer=rank.newcomer and (fact.newcomer or fact.state is not RankState.RUNNING),
        ready=rank.newcomer and fact.ready_to_join,
        follows=fact.follows,
        reason=fact.reason[: MAX_REASON if full_tail else SHORT_REASON],
    )
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
    )


def _events(
    job: JobRecord, old: HostRecord, host: HostRecord, started: list[RankRecord], exited: list[RankRecord], wall: float
) -> Iterable[Event]:
    def event(kind: str, reason: str) -> Event:
        return Event(kind, reason, job.generation, wall)

    def named(ranks: list[RankRecord]) -> str:
        """Newcomers have no rank yet."""
        if host.joining:
            return "1 newcomer" if len(ranks) == 1 else f"{len(ranks)} newcomers"
        return rank_list([rank.rank for rank in ranks])

    if host.engine_address and not old.engine_address:
        yield event("engine_ready", f"the engine of node {host.node_id} listens on {host.engine_address}")
    if started:
        yield event("rank_started", f"{named(started)} on node {host.node_id} started")
    well = [rank for rank in exited if not rank.failed]
    if well:
        yield event("rank_exited", f"{named(well)} on node {host.node_id} exited with code 0")
    badly = [rank for rank in exited if rank.failed]
    for rank in badly[:MAX_EXITS]:
        yield event("rank_exited", describe_exit(rank, job.spec.island_size))
    if badly[MAX_EXITS:]:
        yield event("rank_exited", f"{named(badly[MAX_EXITS:])} on node {host.node_id} did not end well either")
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
