"""Limits of the system that programs meet as an errno or a signal: file descriptors, processes, shared memory."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

_PROCESSES = ("can't start new thread", "Resource temporarily unavailable", "no further thread or process")
_SHARED_MEMORY = ("Bus error", "unable to write to file </torch_", "unable to allocate shared memory", "/dev/shm")
_NEARLY = 0.9  # of a limit that some have left since it was reached
MIB = 1 << 20
SCARCE = (errno.EMFILE, errno.ENFILE)  # No file descriptor is left: for this process, for the machine
_MOST_FILES = 1 << 20  # where the system sets no limit


def descriptor_words(error: OSError, who: str) -> str:
    """``the keeper has no file descriptor left (its limit is 1024): raise it with …``; ``who`` is this process."""
    if error.errno == errno.ENFILE:
        return f"{who} gets no file descriptor: the machine has none left; raise fs.file-max"
    import resource  # not on Windows, where the command line says that it wants Linux

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{who} has no file descriptor left (its limit is {limit}): raise it with ulimit -n, or LimitNOFILE= of its "
        "systemd unit"
    )


def raise_descriptor_limit() -> int:
    """The soft limit of open files becomes the hard one; returns it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system whose limit is lower than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Readable = TypeVar("Readable", bound=int | HasDescriptor)


def await_readable(wanted: Iterable[Readable], timeout_s: float | None = None) -> list[Readable]:
    """Waits until one can read from any of them, or it has ended, and returns these; none after ``timeout_s`` seconds
    (None: waits as long as it takes). Unlike ``select.select`` it takes descriptors from 1024 on."""
    by_number = {one if isinstance(one, int) else one.fileno(): one for one in wanted}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    ready = poll.poll(None if timeout_s is None else math.ceil(1e3 * max(0.0, timeout_s)))
    return [by_number[number] for number, _ in ready]


def process_words(proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup"), own: bool = True) -> str:
    """Says which limit of processes was most likely reached (EAGAIN), and how to raise it. ``own``: by this process,
    whose user is known then."""
    import resource  # here: the command line is imported on systems that lack it, and refuses them in words

    begin = "No further process or thread can be started: "
    if (found := _full_group(proc, root)) is not None:
        group, used, most = found
        return (
            f"{begin}the control group {group} has {used} of the {most} that its pids.max allows. Raise it (TasksMax= "
            "of a systemd unit, --pids-limit of a container, podPidsLimit of a kubelet), or start fewer."
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if own and os.getuid() != 0 and limit != resource.RLIM_INFINITY:  # root has no such limit
        return (
            f"{begin}user {os.getuid()} may have {limit} on this machine, all programs together. Raise that (ulimit "
            "-u, LimitNPROC= of a systemd unit, nproc in /etc/security/limits.conf), or start fewer."
        )
    return (
        f"{begin}its user has as many as `ulimit -u` allows there (LimitNPROC= of a systemd unit), its control group "
        "as many as pids.max (TasksMax=, --pids-limit of a container), or the machine as many as kernel.pid_max and "
        "kernel.threads-max. Raise the one that is reached, or start fewer."
    )


def shared_memory_words(folder: Path = Path("/dev/shm")) -> str:
    """Says how large /dev/shm is, and how to enlarge it."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return ""
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    return (
        f"{folder} was full, it seems: it has {size // MIB} MiB, of which {free // MIB} are free now, and workers of a "
        "DataLoader pass batches there. Enlarge it (mount -o remount,size=8G /dev/shm; --shm-size 8g of a container; "
        "an emptyDir with medium: Memory at /dev/shm of a pod), or take fewer workers."
    )


def limit_words(tail: str, code: int) -> str:
    """Words for the limit that a program has met, by its last words and exit code; empty if it was none of these."""
    if code == -signal.SIGBUS or (code and any(text in tail for text in _SHARED_MEMORY)):
        return shared_memory_words()
    return process_words(own=False) if code and any(text in tail for text in _PROCESSES) else ""


def _full_group(proc: Path, root: Path) -> tuple[str, int, int] | None:
    """The innermost control group that has nearly all processes that it may have: its name, how many, and the limit."""
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        base = root / "pids" if controllers else root
        group = base / path.lstrip("/")
        # A container may see its own group as the root.
        for folder in (group, *group.parents) if group.is_dir() else (base,):
            used, most = (next(iter(_lines(folder / name)), "") for name in ("pids.current", "pids.max"))
            if used.isdecimal() and most.isdecimal() and int(used) >= _NEARLY * int(most):
                return f"/{folder.relative_to(base)}".replace("/.", "/"), int(used), int(most)
            if folder == base:
                break
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
