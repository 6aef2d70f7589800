"""Reads /proc: lists processes and finds those of a job. It changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FILE_LOCKS = 10  # RLIMIT_LOCKS of <linux/resource.h>
_EXITING = 4  # PF_EXITING of <linux/sched.h>
_SIGKILL_WAITS = 1 << (signal.SIGKILL - 1)
_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@dataclass(frozen=True)
class ProcessStatus:
    """A line of /proc/PID/stat. ``start_time``, in clock ticks since boot, names a process together with its pid: the
    number alone is given away again."""

    pid: int
    state: str
    parent: int
    session: int
    start_time: int
    death: int = 0  # the signal of which it is dying, or has died; 0: it lives, or ends with an exit code
    doomed: bool = False  # its end has begun, or SIGKILL waits for it: it does nothing more

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def read_status(pid: int) -> ProcessStatus | None:
    """The process as it is now; None if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold blanks and brackets
    doomed = bool(int(fields[6]) & _EXITING or int(fields[28]) & _SIGKILL_WAITS)
    return ProcessStatus(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), _death(fields), doomed)


def _death(fields: Sequence[str]) -> int:
    """Returns the signal of a process that is about to die, of which its parent will hear. Before that the kernel frees
    its memory.
    """
    number = int(fields[49]) & 0x7F
    return number if int(fields[6]) & _EXITING and number not in _STOPS else 0


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if there is none."""
    status = read_status(pid)
    return status.start_time if status else 0


def all_processes() -> dict[int, ProcessStatus]:
    """Lists every process by pid."""
    found = (read_status(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return {status.pid: status for status in found if status is not None}


def children() -> list[ProcessStatus]:
    """Living children of this process, orphans from below included."""
    return [status for status in all_processes().values() if status.parent == os.getpid() and status.alive]


def below(pid: int) -> list[ProcessStatus]:
    """Living processes that ``pid`` has started, and all that those have started."""
    table = all_processes()
    return [status for status in table.values() if status.alive and _is_below(status, table, pid)]


def marks_of(job_id: str, rank_socket: Path) -> list[bytes]:
    """Entries in the environment of every process below a rank of the job, unless it was cleared on purpose."""
    return [f"BAGUA_JOB_ID={job_id}".encode(), f"BAGUA_DAEMON_SOCKET={rank_socket}".encode()]


def limit_mark(marks: Collection[bytes]) -> int:
    """Soft limit of file locks of every process below a rank of the job: no kernel since 2.4 looks at it, and it stays
    when a process clears its environment, leaves its session or runs as another user."""
    # 7 bytes: "unlimited" has all 64 bits set.
    return int.from_bytes(hashlib.sha256(b"\0".join(marks)).digest()[:7], "little")


@contextlib.contextmanager
def marked(mark: int) -> Iterator[None]:
    """Marks all that this process starts meanwhile. 0: nothing."""
    before = resource.getrlimit(_FILE_LOCKS)
    with contextlib.suppress(OSError, ValueError):  # somebody has set a hard limit
        resource.setrlimit(_FILE_LOCKS, (mark or before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(_FILE_LOCKS, before)


def members(leaders: Mapping[int, int], marks: Collection[bytes], root: int = 0) -> list[ProcessStatus]:
    """Living processes of a job, never this one: those with all of ``marks`` in the environment that they were started
    with, those with its ``limit_mark``, and those in the session of a rank (``leaders``: pid -> start time)
    below the process ``root`` (0: this)."""
    table, root = all_processes(), root or os.getpid()
    return [
        status
        for status in table.values()
        if status.alive
        and status.pid not in (os.getpid(), root)
        and (_in_session(status, leaders, table, root) or _has_marks(status.pid, marks))
    ]


def _in_session(
    status: ProcessStatus, leaders: Mapping[int, int], table: Mapping[int, ProcessStatus], root: int
) -> bool:
    """True if the process is in the session of a rank. When the rank is gone its number may be somebody else's by
    now: then only what runs below ``root`` counts."""
    started = leaders.get(status.session)
    if started is None:
        return False
    leader = table.get(status.session)
    if leader is not None:
        return leader.start_time == started
    return _is_below(status, table, root)


def _is_below(status: ProcessStatus, table: Mapping[int, ProcessStatus], ancestor: int) -> bool:
    seen: set[int] = set()  # the table was not read at one moment: it might hold a circle
    current: ProcessStatus | None = status
    while current is not None and current.pid not in seen:
        if current.parent == ancestor:
            return True
        seen.add(current.pid)
        current = table.get(current.parent)
    return False


def _has_marks(pid: int, marks: Collection[bytes]) -> bool:
    if not marks:
        return False
    with contextlib.suppress(OSError):  # every user may read the limits of a process, and only its own the environment
        limits = (_PROC / str(pid) / "limits").read_text()
        if limits.partition("Max file locks ")[2].split(maxsplit=1)[:1] == [str(limit_mark(marks))]:
            return True
    with contextlib.suppress(OSError):
        return set(marks) <= set((_PROC / str(pid) / "environ").read_bytes().split(b"\0"))
    return False
