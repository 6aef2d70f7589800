"""The state of one job on this node, as an immutable value."""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bagua.base.end_reasons import ORPHANED_NEWCOMER
from bagua.proto import common_pb2


class Phase(enum.Enum):
    PREPARING = "preparing"
    RUNNING = "running"
    FAILING = "failing"
    TERMINATING = "terminating"
    KILLING = "killing"
    CLOSING = "closing"
    STOPPED = "stopped"


class RankPhase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    EXITED = "exited"


@dataclass(frozen=True)
class Rank:
    """Local rank. ``signal`` is 0 for an exit by itself, else ``exit_code`` is -signal. ``member`` names its
    process for life, and in events."""

    rank: int
    member: int
    phase: RankPhase = RankPhase.WAITING
    pid: int = 0
    connected: bool = False  # the core has, or had, its connection
    lost: bool = False  # that connection broke
    left: bool = False  # it took leave of the core, in an elastic job
    newcomer: bool = False  # it began beside the job, and does not train yet
    outside: bool = False  # it has not been in a generation
    ready: bool = False  # it waits for entry
    ends_by: float | None = None  # it will end by itself, or is killed then
    exit_code: int = 0
    signal: int = 0
    error_tail: str = ""
    reason: str = ""  # why it ended before its time
    told_lost: bool = False  # it has told that, and that its program is not to blame
    exited_at: float = 0.0  # seconds since the epoch
    follows: bool = False  # it ended after the job had failed here


@dataclass(frozen=True)
class JobState:
    """State of a job: everything that decisions depend on. ``deadline`` is when ``TimerFired`` is due, on the clock of
    ``now``.
    """

    node_id: str
    ranks: tuple[Rank, ...]
    adopt: bool
    grace_s: float
    join_s: float
    elastic: bool = False  # the loss of a rank is no failure: the coordinator sends the next generation
    island_size: int = 1  # of an elastic job: so many ranks are lost together
    generation: int = 1  # the newest that the coordinator has told
    entered: int = 1  # that of the engine; 0: there are newcomers alone
    lobby: tuple[Rank, ...] = ()  # newcomers that prepare to join
    leaving: tuple[Rank, ...] = ()  # dismissed by a planned change: they end by themselves
    gone: tuple[Rank, ...] = ()  # ranks of former generations
    takes_newcomers: bool = False
    phase: Phase = Phase.PREPARING
    engine: bool = False
    address: str = ""
    peers: tuple[str, ...] = ()
    failure: str = ""  # why the job can't go on here, for ranks that ask
    error: str = ""  # the part of it that the coordinator can't see from the ranks
    pending_error: str = ""
    waiting: str = ""
    suspended: str = ""  # why the engine has suspended the generation that it is in
    lost_hosts: tuple[int, ...] = ()  # indices of the hosts that it has lost, in the generation that it is in
    lost_nodes: tuple[str, ...] = ()  # their nodes
    accused: tuple[str, ...] = ()  # nodes of those with which it could not talk itself
    passes: int = 0  # backward passes that a rank here had begun when a generation last ended
    withdrawn: bool = False  # this node ends its part though nothing has failed
    aborted: bool = False
    deadline: float | None = None

    @property
    def present(self) -> tuple[Rank, ...]:
        """Ranks of which the coordinator is told: those of the generation, newcomers, and those that it has
        dismissed.
        """
        return (*self.ranks, *self.lobby, *self.leaving)

    @property
    def everybody(self) -> tuple[Rank, ...]:
        """Ranks as in ``present``, and those of former generations."""
        return (*self.present, *self.gone)

    @property
    def alive(self) -> tuple[Rank, ...]:
        """Ranks whose process this node has seen and not yet seen ending."""
        return tuple(rank for rank in self.everybody if rank.phase is RankPhase.RUNNING)

    def find(self, member: int) -> Rank | None:
        """The rank with that number, of whichever generation."""
        return next((rank for rank in self.everybody if rank.member == member), None)

    def island(self, rank: Rank) -> tuple[Rank, ...]:
        """The other ranks of its island; none where it is alone, or in no generation."""
        if self.island_size == 1 or rank not in self.ranks:
            return ()
        number = rank.rank // self.island_size
        return tuple(one for one in self.ranks if one.rank // self.island_size == number and one != rank)

    def update(self, member: int, **changes: Any) -> JobState:
        """The state with the rank of that number changed, if there is one."""

        def changed(group: tuple[Rank, ...]) -> tuple[Rank, ...]:
            return tuple(replace(rank, **changes) if rank.member == member else rank for rank in group)

        return replace(
            self,
            ranks=changed(self.ranks),
            lobby=changed(self.lobby),
            leaving=changed(self.leaving),
            gone=changed(self.gone),
        )

    @property
    def visible(self) -> tuple[object, ...]:
        """The part that the coordinator is told; a change of it is a report."""
        # The coordinator is not told the phases between.
        phase = self.phase if self.phase in (Phase.PREPARING, Phase.STOPPED) else Phase.RUNNING
        # Fields that the coordinator does not learn are blank: their change is no report.
        ranks = tuple(
            replace(rank, connected=False, lost=self.elastic and rank.lost, ends_by=None) for rank in self.present
        )
        engine = self.generation, self.entered, self.address, self.suspended, self.lost_hosts, self.accused
        return phase, self.error, self.withdrawn, ranks, self.waiting, engine, self.takes_newcomers


def new_job(
    node_id: str,
    ranks: tuple[int, ...],
    members: tuple[int, ...] = (),
    *,
    joining: tuple[int, ...] = (),
    adopt: bool,
    grace_s: float,
    join_s: float = 0.0,
    elastic: bool = False,
    island_size: int = 1,
    generation: int = 1,
) -> JobState:
    """The state after the first RunJob, before anything was done. ``members``: by rank; none: the same numbers.
    ``grace_s``: between SIGTERM and SIGKILL when nobody says more. ``join_s``: how long the ranks of an adopted job may
    take until the first of them joins. ``joining``: members that are to join a job which goes on elsewhere; then there
    are no ranks."""
    return JobState(
        node_id=node_id,
        ranks=tuple(Rank(rank, member) for rank, member in zip(ranks, members or ranks, strict=True)),
        adopt=adopt,
        grace_s=grace_s,
        join_s=join_s,
        elastic=elastic,
        island_size=island_size,
        generation=generation,
        entered=generation if ranks else 0,
        lobby=newcomers(joining),
    )


def newcomers(members: tuple[int, ...]) -> tuple[Rank, ...]:
    """Members that are to be started, and know of nobody else."""
    return tuple(Rank(number, member, newcomer=True, outside=True) for number, member in enumerate(members))


def describe_exit(rank: Rank, node_id: str) -> str:
    """``rank 2 (pid 77) on node b was killed by SIGKILL``"""
    if rank.signal:
        try:
            how = f"was killed by {signal.Signals(rank.signal).name}"
        except ValueError:
            how = f"was killed by signal {rank.signal}"
    else:
        how = f"exited with code {rank.exit_code}"
    return f"rank {rank.rank} (pid {rank.pid}) on node {node_id} {how}"


@dataclass(frozen=True)
class Beside:
    """Members of a job that are not in its generation here, and more that the daemon's next life has to know.

    ``fresh`` are in it, and do not train yet; ``lobby`` prepare to join; ``leaving`` were dismissed."""

    fresh: Collection[int] = ()
    lobby: Sequence[int] = ()
    leaving: Sequence[int] = ()
    takes_newcomers: bool = False


def resumed(
    job: JobState,
    pids: Mapping[int, int],
    before: Mapping[int, common_pb2.RankStatus],
    beside: Beside,
    leave_by: float,
    *,
    replaced: bool = False,
) -> JobState:
    """``job`` as a daemon finds it whose last life was killed, or was ``replaced`` by the daemon that is installed now:
    members with ``pids`` run, or have ended as their keeper is going to say; others ended ``before``. The engine is
    another one, so its generation is suspended, and newcomers, who knew the last one alone, are given up.
    ``leave_by``: when those that were dismissed are killed."""

    def found(rank: Rank) -> Rank:
        known = before.get(rank.member)
        if known is not None and known.state == common_pb2.RANK_STATE_EXITED:
            names = ("pid", "exit_code", "signal", "error_tail", "reason", "exited_at", "follows")
            return replace(rank, phase=RankPhase.EXITED, **{name: getattr(known, name) for name in names})
        if rank.member in pids:
            fresh = rank.newcomer or rank.member in beside.fresh
            return replace(rank, phase=RankPhase.RUNNING, pid=pids[rank.member], newcomer=fresh)
        return _killed(rank)

    how = "replaced by the one that is installed now" if replaced else "killed and started again"
    given_up = [found(rank) for rank in newcomers(tuple(beside.lobby))]
    return replace(
        job,
        ranks=tuple(found(rank) for rank in job.ranks),
        lobby=tuple(
            rank
            if rank.phase is RankPhase.EXITED
            else _killed(replace(rank, error_tail=ORPHANED_NEWCOMER, reason=ORPHANED_NEWCOMER))
            for rank in given_up
        ),
        leaving=tuple(replace(found(Rank(0, member)), ends_by=leave_by) for member in beside.leaving),
        suspended=f"the daemon on node {job.node_id} was {how}",
        accused=(job.node_id,),  # nobody else is to blame
        takes_newcomers=beside.takes_newcomers,
    )


def _killed(rank: Rank) -> Rank:
    return replace(rank, phase=RankPhase.EXITED, exit_code=-signal.SIGKILL, signal=int(signal.SIGKILL))
