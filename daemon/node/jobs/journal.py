"""Keeps one small JSON file per job on the disk, so that the next run of the daemon can kill leftover ranks."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from bagua.base.disk import replace_file
from bagua.daemon.node.processes.proc import marks_of
from bagua.daemon.node.processes.process import kill_members
from bagua.daemon.node.rules.job_specification import is_safe_name
from bagua.daemon.node.rules.journal_entries import JobEntry, RankEntry

_VERSION = 1
_KILL_S = 5.0
_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "bool": bool, "str": str, "float": (int, float)}


class Journal:
    """The folder of job files. Writes are atomic and on the disk when they return. Any thread.

    What can't be written is owed, the newest of each job: ``write_owed`` tries it again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._owed: dict[str, JobEntry] = {}  # protected by the lock, as the files are

    def write(self, entry: JobEntry) -> None:
        """Replaces the job's file. Blocks on the disk. Raises OSError."""
        with self._lock:
            self._owed[entry.job_id] = entry
            self._write(entry)

    def owes(self, job_id: str) -> bool:
        """True if the last write of the job failed."""
        return job_id in self._owed

    def write_owed(self, job_id: str) -> None:
        """Writes what is owed of the job, if anything. Blocks on the disk. Raises OSError."""
        with self._lock:
            if job_id in self._owed:
                self._write(self._owed[job_id])

    def _write(self, entry: JobEntry) -> None:
        replace_file(self._path(entry.job_id), json.dumps({"version": _VERSION, **asdict(entry)}))
        del self._owed[entry.job_id]

    def remove(self, job_id: str) -> None:
        """Removes the entry of a job."""
        with self._lock:
            self._owed.pop(job_id, None)
            self._path(job_id).unlink(missing_ok=True)

    def read_all(self) -> tuple[list[JobEntry], list[Path]]:
        """Returns (jobs, oldest first; files that can't be understood)."""
        entries, broken = [], []
        for path in sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime):
            try:
                entries.append(_parse(json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                broken.append(path)
        return entries, broken

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


def _parse(data: Any) -> JobEntry:
    """Raises ValueError, KeyError, TypeError for what this version did not write: pids in there will be killed."""
    if not isinstance(data, dict) or data.pop("version") != _VERSION:
        raise ValueError("not a journal of this version")
    entry = JobEntry(**{**data, "ranks": tuple(RankEntry(**rank) for rank in data["ranks"])})
    records: tuple[JobEntry | RankEntry, ...] = (entry, *entry.ranks)
    for record in records:
        for field in fields(record):
            kind = _KINDS.get(str(field.type))
            if kind is not None and not isinstance(getattr(record, field.name), kind):
                raise TypeError(f"{field.name} is no {field.type}")
    if not is_safe_name(entry.job_id):
        raise ValueError("the job's id can't be a file name")
    return entry


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
