"""Control groups (cgroup v2), one for each job: whatever its ranks start stays in the job's, also a process that leaves
their session and clears its environment. The group is made beside this process, where that is allowed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from bagua.base.control_group import PROCESSES, own_group
from bagua.daemon.node.processes.proc import ProcessStatus, read_status


class JobGroups:
    """Groups of the jobs of the node with this state folder. ``beside``: None where there can be no groups."""

    def __init__(self, state_dir: Path, beside: Path | None) -> None:
        self._beside = beside
        self._prefix = f"bagua-{hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:12]}-"

    def make(self, job_id: str) -> str:
        """Makes the group of a job, if there is none yet. Returns the file that processes enter it by; empty: there
        can be no group."""
        path = self._path(job_id)
        if path is None or not os.access(path.parent / PROCESSES, os.W_OK):
            return ""
        try:
            path.mkdir(exist_ok=True)
            (path / "cgroup.max.descendants").write_text("0")  # so that all of its processes are listed in one file
        except OSError:
            return ""
        return str(path / PROCESSES)

    def processes(self, job_id: str) -> list[ProcessStatus]:
        """Living processes in the group of a job; none where it can't be read: a program that may write there can make
        it one of threads. Then its processes are known by their marks."""
        path = self._path(job_id)
        if path is None:
            return []
        try:
            pids = (path / PROCESSES).read_text().split()
        except OSError:
            return []
        found = (read_status(int(pid)) for pid in pids)
        return [status for status in found if status is not None and status.alive]

    def remove(self, job_id: str) -> None:
        """Removes the group, which has no processes any more."""
        if (path := self._path(job_id)) is not None:
            with contextlib.suppress(OSError):
                path.rmdir()

    def jobs(self) -> list[str]:
        """Jobs that have processes in a group, of any life of this node. Empty groups, of nodes that are gone, too, are
        removed."""
        if self._beside is None:
            return []
        for path in self._beside.glob("bagua-????????????-*"):  # of every node: twelve digits are its hash
            with contextlib.suppress(OSError):  # it has processes, or is another user's
                path.rmdir()
        return [path.name.removeprefix(self._prefix) for path in self._beside.glob(f"{self._prefix}*")]

    def _path(self, job_id: str) -> Path | None:
        return None if self._beside is None else self._beside / f"{self._prefix}{job_id}"


@contextlib.contextmanager
def inside(group: str) -> Iterator[None]:
    """This process is in a group meanwhile, and what it starts stays there. ``group``: from ``JobGroups.make``."""
    own = _enter(Path(group)) if group else None
    try:
        yield
    finally:
        if own is not None:
            with contextlib.suppress(OSError):  # nobody ends the keeper, wherever it is
                (own / PROCESSES).write_text("0")


def _enter(group: Path) -> Path | None:
    """Returns the group that this process came from; None if it is there still."""
    own = own_group()
    if own is not None:
        try:
            group.write_text("0")
        except OSError:
            own = None
    return own
