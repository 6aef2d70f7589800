"""Forms the next generation of an elastic job: members in their order, with ranks counted anew."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bagua.base import islands
from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, Phase, Plan, RankRecord, RankState

# Fields of a host whose engine begins anew, and has said nothing yet.
_BEGINNING: dict[str, Any] = {"waiting": "", "suspended": "", "suspended_clock": 0.0, "lost_hosts": (), "accused": ()}
_KEPT = 200  # parts that are out and of which nothing is left, for people to see


@dataclass(frozen=True)
class Regroup:
    """The next generation. ``out``: parts that are in no generation any more; ``joining``: those in none yet."""

    hosts: tuple[HostRecord, ...]
    out: tuple[HostRecord, ...]
    joining: tuple[HostRecord, ...]
    reason: str = ""
    stalls: int = 0
    stalled_passes: int = 0
    accusations: tuple[tuple[str, str], ...] = ()
    put_out: tuple[tuple[str, str, float], ...] = ()  # in addition to those of before
    plan: Plan = Plan.AT_ONCE


def regrouped(job: JobRecord, step: Regroup, now: float) -> JobRecord:
    """``job`` in its next generation."""
    return replace(
        job,
        generation=job.generation + 1,
        plan=step.plan,
        hosts=step.hosts,
        former=with_former(job, step.out),
        joining=step.joining,
        stalls=step.stalls,
        stalled_passes=step.stalled_passes,
        accusations=step.accusations,
        put_out=(*job.put_out, *step.put_out),
        placed_clock=now,
        master_addr=step.hosts[0].address,
    )


def with_former(job: JobRecord, out: Sequence[HostRecord]) -> tuple[HostRecord, ...]:
    """The parts that are out, those of ``out`` included; of the oldest only those that still hold something."""
    former = sorted((*job.former, *out), key=lambda part: -part.index)
    old = former[: max(0, len(former) - _KEPT)]
    return (*(part for part in old if part.phase is not Phase.STOPPED), *former[len(old) :])


def survivors(job: JobRecord, lost: Collection[str], now: float, newcomers_stay: bool) -> Regroup:
    """Regroups all members that run, but for the hosts in ``lost``. Without ``newcomers_stay``, those who have no state
    yet go back to the lobby.
    """
    numbers = Numbers(job)
    hosts: list[HostRecord] = []
    out: list[HostRecord] = []
    joining = list(job.joining)
    for host in job.hosts:
        if host.node_id in lost or host.phase is Phase.STOPPED:
            out.append(_out(host, numbers, job.generation))
            continue
        running, dead = _by_life(host, job.spec.island_size)
        staying = [rank for rank in running if newcomers_stay or not rank.newcomer]
        waiting = [rank for rank in running if rank.newcomer and not newcomers_stay]
        if not staying and not waiting:
            out.append(_out(host, numbers, job.generation))
            continue
        out += [_dead_part(host, rank, numbers, job.generation) for rank in dead]
        if waiting:
            joining.append(_lobby(host, waiting, numbers, now))
        if staying:
            hosts.append(replace(host, ranks=tuple(staying)))
    for part in [part for part in joining if part.node_id in lost]:
        joining.remove(part)
        out.append(replace(part, joining=False, since_clock=0.0))
    joining.sort(key=lambda part: -part.index)  # in the order of their coming: indices go down from -1
    return Regroup(counted(hosts, fresh=True), tuple(out), tuple(joining))


def changed(job: JobRecord, admitted: Sequence[HostRecord], left: Collection[str]) -> Regroup:
    """The hosts of now but for those in ``left``, who are dismissed, and the newcomers of ``admitted``."""
    numbers = Numbers(job)
    new = {part.node_id: part for part in admitted}
    hosts: list[HostRecord] = []
    out: list[HostRecord] = []
    for host in job.hosts:
        if host.node_id in left:
            out.append(replace(_out(host, numbers, job.generation), dismissed=True))
            continue
        running, dead = _by_life(host, job.spec.island_size)
        out += [_dead_part(host, rank, numbers, job.generation) for rank in dead]
        part = new.pop(host.node_id, None)
        hosts.append(replace(host, ranks=(*running, *(part.ranks if part is not None else ()))))
    hosts += [replace(part, joining=False, since_clock=0.0) for part in new.values()]  # last: rank 0 has state
    entering = {part.index for part in admitted}
    joining = tuple(part for part in job.joining if part.index not in entering)
    return Regroup(counted(hosts, fresh=False), tuple(out), joining, plan=Plan.PLANNED)


def _by_life(host: HostRecord, island_size: int) -> tuple[list[RankRecord], list[RankRecord]]:
    """Returns (ranks that go on, those that have ended, with the others of their islands)."""
    return islands.divide(host.ranks, island_size, lambda rank: rank.state is RankState.EXITED)


class Numbers:
    """Negative indices, for parts that are no hosts."""

    def __init__(self, job: JobRecord) -> None:
        self._last = min((part.index for part in (*job.former, *job.joining)), default=0)

    def next(self) -> int:
        """Returns a number that no part of the job has."""
        self._last = min(self._last, 0) - 1
        return self._last


def counted(hosts: Iterable[HostRecord], fresh: bool) -> tuple[HostRecord, ...]:
    """Returns the hosts with indices and ranks counted anew. ``fresh``: their engines begin anew, too."""
    found: list[HostRecord] = []
    first = 0
    for host in hosts:
        ranks = tuple(rank.moved(first + local, local) for local, rank in enumerate(host.ranks))
        host = replace(host, index=len(found), first_rank=first, nranks=len(ranks), ranks=ranks)
        if fresh:
            host = replace(host, **_BEGINNING)
        found.append(host)
        first += len(ranks)
    return tuple(found)


def _numbered(ranks: Iterable[RankRecord]) -> tuple[RankRecord, ...]:
    return tuple(replace(rank, member=rank.number) for rank in ranks)


def _out(host: HostRecord, numbers: Numbers, generation: int) -> HostRecord:
    return replace(host, index=numbers.next(), last_generation=generation, ranks=_numbered(host.ranks))


def _lobby(host: HostRecord, ranks: Sequence[RankRecord], numbers: Numbers, now: float) -> HostRecord:
    """The newcomers of a host, once more in no generation."""
    return replace(
        host,
        index=numbers.next(),
        first_rank=0,
        nranks=len(ranks),
        joining=True,
        since_clock=now,
        entered=0,
        **_BEGINNING,
        ranks=tuple(
            replace(rank, rank=local, local_rank=local, member=rank.number) for local, rank in enumerate(ranks)
        ),
    )


def _dead_part(host: HostRecord, rank: RankRecord, numbers: Numbers, generation: int) -> HostRecord:
    """The part of one rank that has ended, on a host that goes on: nothing of it is left there."""
    return HostRecord(
        index=numbers.next(),
        node_id=host.node_id,
        hostname=host.hostname,
        address=host.address,
        boot_id=host.boot_id,
        first_rank=rank.rank,
        nranks=1,
        phase=Phase.STOPPED,
        last_generation=generation,
        ranks=(replace(rank, local_rank=0, member=rank.number),),
    )
