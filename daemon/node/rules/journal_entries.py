"""The journal's entries: what the next run of the daemon must know of a job and its ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankEntry:
    """Entry of a local rank, of this generation or gone. ``start_time``: clock ticks since boot (see proc.py); 0
    with pid 0 before the start.
    """

    rank: int
    local_rank: int
    pid: int = 0
    start_time: int = 0
    exited: bool = False
    exit_code: int = 0
    signal: int = 0
    error_tail: str = ""
    exited_at: float = 0.0
    follows: bool = False
    reason: str = ""
    member: int = -1  # -1: the same number as rank

    @property
    def number(self) -> int:
        """Number of the process, for life."""
        return self.rank if self.member < 0 else self.member


@dataclass(frozen=True)
class JobEntry:
    """Entry of a job. ``ended``: nothing of it is left here."""

    job_id: str
    generation: int
    adopt: bool
    rank_socket: str
    ranks: tuple[RankEntry, ...]
    ended: bool = False
    error: str = ""
