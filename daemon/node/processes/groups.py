"""Control groups (cgroup v2), one for each job: whatever its ranks start stays in the job's, also a process that leaves
their session and clears its environment. The group is made beside this process, where that is allowed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from bagua.daemon.node.processes.proc import ProcessStatus, read_status

_PROCESSES = "cgroup.procs"


class JobGroups:
    """Groups of the jobs of the node with this state folder. ``beside``: None where there can be no groups."""

    def __init__(self, state_dir: Path, beside: Path | None) -> None:
        self._beside = beside
        self._prefix = f"bagua-{hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:12]}-"

    def make(self, job_id: str) -> str:
        """Makes the group of a job, if there is none yet. Returns the file that processes enter it by; empty: there
        can be no group."""
        path = self._path(job_id)
        if path is None or not os.access(path.parent / _PROCESSES, os.W_OK):
            return ""
        try:
            path.mkdir(exist_ok=True)
            (path / "cgroup.max.descendants").write_text("0")  # so that all of its processes are listed in one file
        except OSError:
            return ""
        return str(path / _PROCESSES)

    def processes(self, job_id: str) -> list[ProcessStatus]:
        """Living processes in the group of a job; none where it can't be read: a program that may write there can make
        it one of threads. Then its processes are known by their marks."""
        path = self._path(job_id)
        if path is None:
            return []
        try:
            pids = (path / _PROCESSES).read_text().split()
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
        for path in self._beside.glob("bagua-????????????-*"):
            with contextlib.suppress(OSError):  # it has processes, or is another user's
                path.rmdir()
        return [path.name.removeprefix(self._prefix) for path in self._beside.glob(f"{self._prefix}*")]

    def _path(self, job_id: str) -> Path | None:
        return None if self._beside is None else self._beside / f"{self._prefix}{job_id}"


def own_group(proc: Path = Path("/proc/self")) -> Path | None:
    """The group of this process, as it is mounted. None: version 2 is not mounted here, or not this part of it."""
    try:
        lines, mounts = (proc / "cgroup").read_text().splitlines(), (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")
    for mount in mounts:
        fields, _, kind = mount.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, folder = fields.split()[3:5]
            found = Path(folder) / os.path.relpath(own or "/", root)
            return found if own and ".." not in found.parts and (found / _PROCESSES).exists() else None
    return None


@contextlib.contextmanager
def inside(group: str) -> Iterator[None]:
    """This process is in a group meanwhile, and what it starts stays there. ``group``: from ``JobGroups.make``."""
    own = _enter(Path(group)) if group else None
    try:
        yield
    finally:
        if own is not None:
            with contextlib.suppress(OSError):  # nobody ends the keeper, wherever it is
                (own / _PROCESSES).write_text("0")


def _enter(group: Path) -> Path | None:
    """Returns the group that this process came from; None if it is there still."""
    own = own_group()
    if own is not None:
        try:
            group.write_text("0")
        except OSError:
            own = None
    return own
