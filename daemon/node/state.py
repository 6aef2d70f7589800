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
    """One local rank. ``signal`` is 0 for an exit by itself, else ``exit_code`` is -signal."""

    rank: int
    phase: RankPhase = RankPhase.WAITING
    pid: int = 0
    connected: bool = False  # the core has, or had, its connection
    lost: bool = False  # that connection broke
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
    phase: Phase = Phase.PREPARING
    engine: bool = False
    address: str = ""
    peers: tuple[str, ...] = ()
    failure: str = ""  # why the job can't go on here, for ranks that ask
    error: str = ""  # the part of it that the coordinator can't see from the ranks
    pending_error: str = ""
    waiting: str = ""
    aborted: bool = False
    deadline: float | None = None

    @property
    def alive(self) -> tuple[Rank, ...]:
        """Ranks whose process this node has seen and not yet seen ending."""
        return tuple(rank for rank in self.ranks if rank.phase is RankPhase.RUNNING)

    @property
    def visible(self) -> tuple[object, ...]:
        """What the coordinator is told; a change of it is a report."""
        phase = self.phase if self.phase in (Phase.PREPARING, Phase.STOPPED) else Phase.RUNNING
        ranks = tuple(replace(rank, connected=False, lost=False) for rank in self.ranks)
        return phase, self.address, self.error, ranks, self.waiting


def new_job(node_id: str, ranks: tuple[int, ...], *, adopt: bool, grace_s: float, join_s: float = 0.0) -> JobState:
    """The state after a RunJob, before anything was done. ``grace_s``: between SIGTERM and SIGKILL when nobody says
    more. ``join_s``: how long the ranks of an adopted job may take until the first of them joins."""
    return JobState(node_id, tuple(Rank(rank) for rank in ranks), adopt, grace_s, join_s)


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
