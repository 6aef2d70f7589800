"""The state of one job on this node, as an immutable value."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace


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
    """One local rank. ``signal`` is 0 for an exit by itself, else ``exit_code`` is -signal. ``member`` names its
    process for life, and in events."""

    rank: int
    member: int
    phase: RankPhase = RankPhase.WAITING
    pid: int = 0
    connected: bool = False  # the core has, or had, its connection
    lost: bool = False  # that connection broke
    left: bool = False  # it took leave of the core, in an elastic job
    exit_code: int = 0
    signal: int = 0
    error_tail: str = ""
    exited_at: float = 0.0  # seconds since the epoch
    follows: bool = False  # it ended after the job had failed here


@dataclass(frozen=True)
class JobState:
    """Everything that decisions depend on. ``deadline`` is when ``TimerFired`` is due, on the clock of ``now``."""

    node_id: str
    ranks: tuple[Rank, ...]
    adopt: bool
    grace_s: float
    join_s: float
    elastic: bool = False  # the loss of a rank is no failure: the coordinator sends the next generation
    generation: int = 1
    gone: tuple[Rank, ...] = ()  # ranks of former generations
    phase: Phase = Phase.PREPARING
    engine: bool = False
    address: str = ""
    peers: tuple[str, ...] = ()
    failure: str = ""  # why the job can't go on here, for ranks that ask
    error: str = ""  # the part of it that the coordinator can't see from the ranks
    pending_error: str = ""
    waiting: str = ""
    suspended: str = ""  # why the engine has suspended this generation
    lost_hosts: tuple[int, ...] = ()  # indices in this generation of the hosts that it has lost
    withdrawn: bool = False  # this node ends its part though nothing has failed
    aborted: bool = False
    deadline: float | None = None

    @property
    def alive(self) -> tuple[Rank, ...]:
        """Ranks whose process this node has seen and not yet seen ending."""
        return tuple(rank for rank in (*self.ranks, *self.gone) if rank.phase is RankPhase.RUNNING)

    @property
    def visible(self) -> tuple[object, ...]:
        """The part that the coordinator is told; a change of it is a report."""
        phase = self.phase if self.phase in (Phase.PREPARING, Phase.STOPPED) else Phase.RUNNING
        ranks = tuple(replace(rank, connected=False, lost=self.elastic and rank.lost) for rank in self.ranks)
        engine = self.generation, self.address, self.suspended, self.lost_hosts
        return phase, self.error, self.withdrawn, ranks, self.waiting, engine


def new_job(
    node_id: str,
    ranks: tuple[int, ...],
    *,
    adopt: bool,
    grace_s: float,
    join_s: float = 0.0,
    elastic: bool = False,
    generation: int = 1,
) -> JobState:
    """The state after the first RunJob, before anything was done. ``grace_s``: between SIGTERM and SIGKILL when nobody
    says more. ``join_s``: how long the ranks of an adopted job may take until the first of them joins."""
    members = tuple(Rank(rank, rank) for rank in ranks)
    return JobState(node_id, members, adopt, grace_s, join_s, elastic, generation)


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
