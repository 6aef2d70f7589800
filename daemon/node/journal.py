"""What must survive the daemon: one small JSON file per job, so that the next life finds and kills what this one
left."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bagua.daemon.node.plan import is_safe_name
from bagua.daemon.node.proc import marks_of
from bagua.daemon.node.process import kill_members

_VERSION = 1
_KILL_S = 5.0


@dataclass(frozen=True)
class RankEntry:
    """One local rank. ``start_time``: clock ticks since boot (see process.py); 0 with pid 0 before the start."""

    rank: int
    local_rank: int
    pid: int = 0
    start_time: int = 0
    exited: bool = False
    exit_code: int = 0
    signal: int = 0
    error_tail: str = ""
    exited_at: float = 0.0


@dataclass(frozen=True)
class JobEntry:
    """One job. ``ended``: nothing of it is left here."""

    job_id: str
    generation: int
    adopt: bool
    rank_socket: str
    ranks: tuple[RankEntry, ...]
    ended: bool = False
    error: str = ""


class Journal:
    """The folder of job files. Writes are atomic and on the disk when they return."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, entry: JobEntry) -> None:
        """Replaces the job's file. Blocks on the disk. Raises OSError."""
        path = self._path(entry.job_id)
        temporary = path.with_name(f".{path.name}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, **asdict(entry)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, job_id: str) -> None:
        self._path(job_id).unlink(missing_ok=True)

    def read_all(self) -> tuple[list[JobEntry], list[Path]]:
        """(jobs, oldest first; files that can't be understood)."""
        entries, broken = [], []
        for path in sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime):
            try:
                entries.append(_parse(json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, KeyError, TypeError):
                broken.append(path)
        return entries, broken

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


def _parse(data: dict[str, Any]) -> JobEntry:
    if data.pop("version") != _VERSION or not is_safe_name(data["job_id"]):
        raise ValueError("not a journal of this version")
    data["ranks"] = tuple(RankEntry(**rank) for rank in data["ranks"])
    return JobEntry(**data)


async def end_leftovers(entry: JobEntry, error: str) -> JobEntry:
    """Kills what is left of a job of an earlier life; the entry as it then is, ended for the reason ``error``.

    A rank's pid counts only with its start time: the number may belong to somebody else by now. Ranks that others
    started are left alone.
    """
    if not entry.adopt:
        leaders = {rank.pid: rank.start_time for rank in entry.ranks if rank.pid}
        await kill_members(leaders, marks_of(entry.job_id, Path(entry.rank_socket)), _KILL_S)
    ranks = tuple(
        rank if rank.exited or not rank.pid else replace(rank, exited=True, exit_code=-9, signal=9)
        for rank in entry.ranks
    )
    return replace(entry, ranks=ranks, ended=True, error=entry.error or error)
