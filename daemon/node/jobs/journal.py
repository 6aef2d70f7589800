"""Keeps one small JSON file per job on the disk, so that the next run of the daemon can kill leftover ranks."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from bagua.base.disk import replace_file
from bagua.daemon.node.processes.proc import marks_of
from bagua.daemon.node.processes.process import kill_members
from bagua.daemon.node.rules.job_specification import is_safe_name
from bagua.proto import common_pb2, node_pb2

_VERSION = 2
KILL_S = 5.0


@dataclass(frozen=True)
class JobEntry:
    """A job as the next life of the daemon must know it: its last report, and how to find its processes.
    ``start_times``: by pid, in clock ticks since boot (see proc.py)."""

    job: node_pb2.LocalJob
    adopt: bool
    rank_socket: str
    start_times: dict[int, int]

    @property
    def ended(self) -> bool:
        """True if nothing of the job is left here."""
        return self.job.phase == node_pb2.LOCAL_PHASE_STOPPED


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
            self._owed[entry.job.job_id] = entry  # until it is written
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
        about = {"version": _VERSION, **vars(entry), "job": MessageToDict(entry.job, preserving_proto_field_name=True)}
        replace_file(self._path(entry.job.job_id), json.dumps(about))
        del self._owed[entry.job.job_id]

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
            except (OSError, ParseError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                broken.append(path)
        return entries, broken

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"


def _parse(data: Any) -> JobEntry:
    """Raises an error for what this version did not write: pids in there will be killed."""
    if data["version"] != _VERSION:
        raise ValueError("not a journal of this version")
    job = ParseDict(data["job"], node_pb2.LocalJob())
    if not is_safe_name(job.job_id):
        raise ValueError("the job's id can't be a file name")
    start_times = {int(pid): int(ticks) for pid, ticks in data["start_times"].items()}
    return JobEntry(job, bool(data["adopt"]), str(data["rank_socket"]), start_times)


async def end_leftovers(entry: JobEntry, error: str) -> None:
    """Kills what is left of a job of an earlier life. The entry then says that it has ended, for the reason ``error``.

    A rank's pid counts only with its start time: the number may belong to somebody else by now. Ranks that others
    started are left alone.
    """
    job = entry.job
    if not entry.adopt:
        leaders = {rank.pid: entry.start_times.get(rank.pid, 0) for rank in job.ranks if rank.pid}
        await kill_members(leaders, marks_of(job.job_id, Path(entry.rank_socket)), KILL_S)
    for rank in job.ranks:
        if rank.pid and rank.state != common_pb2.RANK_STATE_EXITED:
            rank.state, rank.exit_code, rank.signal = common_pb2.RANK_STATE_EXITED, -9, 9
            rank.follows = True  # the cause is in ``error``
    job.phase, job.error, job.withdrawn = node_pb2.LOCAL_PHASE_STOPPED, job.error or error, True
