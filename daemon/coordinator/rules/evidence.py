"""Finds who is out of an elastic job: pure functions of facts and clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, Phase, Plan, RankRecord, RankState
from bagua.daemon.coordinator.rules.failure_reasons import Nodes, describe_exit, silent_since
from bagua.daemon.coordinator.rules.options import Options

_SHOWN = 3  # losses that are named in one sentence


@dataclass(frozen=True)
class Evidence:
    """``lost``: hosts that are out, and why; ``dead``: ranks that have ended on the others; ``suspended``: hosts whose
    engine has lost somebody; ``away``: a node that is not lost has no session; ``wake``: when silence tells more;
    ``island_size``: of the job."""

    lost: dict[str, str]
    dead: tuple[RankRecord, ...]
    suspended: tuple[HostRecord, ...]
    away: bool
    wake: float | None
    island_size: int = 1

    def __bool__(self) -> bool:
        return bool(self.lost or self.dead or self.suspended)

    @property
    def words(self) -> str:
        """The losses, in one sentence without a full stop."""
        first: dict[int, RankRecord] = {}  # of each island: the others were ended, or failed, for it
        for rank in sorted(self.dead, key=lambda rank: (rank.follows, rank.exited_at, rank.rank)):
            first.setdefault(rank.rank // self.island_size, rank)
        ends = (describe_exit(rank, self.island_size) for rank in first.values())
        losses = [*self.lost.values(), *(" ".join(end.split()) for end in ends)]
        more = f" and {len(losses) - _SHOWN} more" if len(losses) > _SHOWN else ""
        return f"{'; '.join(loss.rstrip('.') for loss in losses[:_SHOWN])}{more}"


def find(job: JobRecord, nodes: Nodes, now: float, options: Options) -> Evidence:
    """Finds everything that speaks against a member of the current generation."""
    lost: dict[str, str] = {}
    wake: list[float] = []
    away = False
    accused = accusers(job, nodes, options)
    watched = _watched(job, nodes, options)
    for host in job.hosts:
        words, at = host_loss(job, host, accused.get(host.node_id), nodes, now, options, host.node_id in watched)
        if words:
            lost[host.node_id] = words
        elif at is not None:
            wake.append(at)
            away = away or silent_since(host, nodes, options) is not None
    dead = [rank for host in job.hosts if host.losses and host.node_id not in lost for rank in host.losses]
    suspended = tuple(host for host in job.hosts if host.suspended)
    return Evidence(lost, tuple(dead), suspended, away, min(wake, default=None), job.spec.island_size)


def failed_by_itself(host: HostRecord) -> bool:
    """True if an error of its engine or an exception of a rank will end the job. Newcomers fail alone."""
    if host.withdrawn or host.new:
        return False
    return bool(host.error) or any(not rank.signal and not rank.newcomer for rank in host.failed)


def accusers(job: JobRecord, nodes: Nodes, options: Options) -> dict[str, HostRecord]:
    """Node -> the first host, of those that the coordinator hears, whose engine has lost the one there."""
    found: dict[str, HostRecord] = {}
    for witness in job.hosts:
        if witness.lost_hosts and silent_since(witness, nodes, options) is None:
            for node_id in witness.lost_hosts:
                found.setdefault(node_id, witness)
    return found


def host_loss(
    job: JobRecord,
    host: HostRecord,
    accuser: HostRecord | None,
    nodes: Nodes,
    now: float,
    options: Options,
    watched: bool = False,
) -> tuple[str, float | None]:
    """Returns (why the whole host is out, None), or (empty, when to look again). ``accuser``: see ``accusers``;
    ``watched``: see ``_watched``.
    """
    if host.withdrawn or (host.new and host.error):
        return host.error_text, None
    if host.phase is Phase.STOPPED:
        return ("" if host.exited else f"node {host.name} has nothing left of the job"), None
    node = nodes.get(host.node_id)
    heard = silent_since(host, nodes, options)
    if heard is None:
        if accuser is None or node is None or not node.heard_clock:
            return "", None
        late = _silent_at(node.heard_clock, accuser.suspended_clock, options)
        if now < late:
            return "", late
        return f"node {host.name} is silent, and node {accuser.node_id} has lost it", None
    limit = longest_silence(nodes, options, heard, job.patience_s, watched and accuser is None)
    if accuser is None and not host.new:
        limit = max(limit, job.patience_s)
    if now >= heard + limit:
        return f"node {host.name} has not been heard of for {limit:g} s", None
    if accuser is not None and node is not None and node.hung_up:
        return f"node {host.name} is gone: its session ended, and node {accuser.node_id} has lost it, too", None
    return "", heard + limit


def longest_silence(
    nodes: Nodes, options: Options, heard: float, patience_s: float = 0.0, watched: bool = False
) -> float:
    """Returns the seconds without a word, since ``heard``, after which a node is out. One that its peers watch is out
    when nothing can be left of its ranks: before that it is they who lose it, after eight median steps of theirs. While
    no node at all is heard it is rather this coordinator that is cut off, as one is that leads while all daemons know
    another one's address: then it is the same, later for one that is new. Nobody could go on without them meanwhile.
    """
    if not any(node.connected for node in nodes.values()):
        return options.gone_at(heard, patience_s) - heard
    if watched:
        return options.gone_s(patience_s) if options.fence_s else max(options.lease_s, options.watched_s + patience_s)
    return options.lease_s


def _watched(job: JobRecord, nodes: Nodes, options: Options) -> frozenset[str]:
    """Nodes of the hosts whose silence is seen by a peer as soon as it waits for them: both train in this generation,
    or in the last one as long as a planned change waits for its step. Who has suspended it waits for nobody.

    Where all hosts that hold the job's state are silent, these: nobody could go on without them."""
    holders = [host for host in job.hosts if not (host.new or host.exited or host.phase is Phase.STOPPED)]
    if not any(silent_since(host, nodes, options) is None for host in holders):
        return frozenset(host.node_id for host in holders)
    if job.plan.holds:
        return frozenset()
    before = not passed(job)
    training = [
        host
        for host in job.hosts
        if (host.entered == job.generation or (before and host.entered))
        and host.phase is not Phase.STOPPED
        and not host.exited
    ]
    if any(not host.suspended and silent_since(host, nodes, options) is None for host in training):
        return frozenset(host.node_id for host in training)
    return frozenset()


def _silent_at(heard: float, lost: float, options: Options) -> float:
    """Returns when a host counts as silent that was heard of, and lost by a peer, at these moments. Where it was lost
    soon after a word of it, its connection broke: its daemon may be starting again, and has the whole time for that.
    Where it was lost a moment too soon, it may be either, and has as long as a start takes mostly.
    """
    if lost >= heard + options.silence_s:
        return heard + options.silence_s
    if lost >= heard + options.silence_s - options.last_words_s:
        return lost + options.last_words_s
    return max(heard, lost) + options.silence_s


def leaving(job: JobRecord, lost: Iterable[str] = ()) -> bool:
    """True if a rank has taken leave in good order, and its process has not ended yet: it can't be a member, and the
    job must not end while it does."""
    there = (host for host in job.hosts if host.ending and host.node_id not in lost)
    return any(rank.left and rank.state is not RankState.EXITED for host in there for rank in host.ranks)


def ending(job: JobRecord) -> bool:
    """True if the program comes to its end: some rank has left, or has ended well."""
    return any(host.ending for host in job.hosts)


def settled(job: JobRecord) -> bool:
    """True if every host has entered the current generation, and has state; or if the job holds."""
    return job.plan.holds or all(
        (host.entered == job.generation and not host.has_newcomers) or host.phase is Phase.STOPPED for host in job.hosts
    )


def passed(job: JobRecord) -> bool:
    """True if the step after which the current generation was to begin is over, as far as is known: somebody with
    state has entered it."""
    if job.plan is not Plan.PLANNED:
        return True
    return any(host.entered == job.generation and not host.new for host in job.hosts)


def begins_anew(job: JobRecord, now: float, options: Options) -> bool:
    """True unless the job has stalled before and has made no step since."""
    return not (job.stalls or job.accusations) or progressed(job, now, options)


def progressed(job: JobRecord, now: float, options: Options) -> bool:
    """True if a step was made since the first of the stalls, or since newcomers entered. Whoever begins another
    backward pass has committed the one before; the first after a stall is no sign, as a rank may have stood between
    two. Programs that have no model of ours tell of no passes: they have a time."""
    late = now >= job.placed_clock + options.stall_s + job.patience_s
    return late or job.passes > job.stalled_passes
