"""Faults of single connections of another process: a child of this one, or anybody's as root.

The kernel hands out a copy of a process's descriptor (pidfd_getfd). What is done to the copy happens to the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PIDFD_GETFD = 438  # number of a system call that Python does not have
_SO_MAX_PACING_RATE = 47
_ESTABLISHED = "01"
UNLIMITED = -1


def connections(pid: int, but: int) -> list[int]:
    """Descriptors of the process's TCP connections, but for those that begin or end at port ``but``."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            ends = {int(end.rpartition(":")[2], 16) for end in words[1:3]}
            if words[3] == _ESTABLISHED and but not in ends:
                inodes.add(f"socket:[{words[9]}]")
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(entry) in inodes:
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def copies(pid: int, but: int) -> Iterator[list[socket.socket]]:
    """Copies of these connections. Raises OSError if the process is gone, or not ours."""
    process = os.pidfd_open(pid)
    found: list[socket.socket] = []
    try:
        for descriptor in connections(pid, but):
            copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
            if copy >= 0:
                found.append(socket.socket(fileno=copy))
            elif ctypes.get_errno() == 1:  # EPERM
                raise PermissionError(f"The connections of process {pid} can't be reached: run this as root. [BG003]")
        yield found
    finally:
        for one in found:
            one.close()
        os.close(process)


def cut(pid: int, but: int) -> int:
    """Ends these connections of the process; returns how many there were."""
    with copies(pid, but) as found:
        for one in found:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return len(found)


def pace(pid: int, but: int, bytes_per_s: int) -> int:
    """Lets the process send no faster than that on each of these connections."""
    with copies(pid, but) as found:
        for one in found:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)
        return len(found)


def delay(pid: int, but: int, most_s: float, lasts_s: float) -> int:
    """Delays what the process sends on each of these connections, for ``lasts_s``, by up to ``most_s``, at most 0.2 s.
    Less than 64 KiB wait so; more goes at once, as much as fills packets.
    """
    with copies(pid, but) as found:
        until = time.monotonic() + lasts_s
        while found and time.monotonic() < until:
            with held(found):
                time.sleep(most_s)
        return len(found)


@contextlib.contextmanager
def held(connections: Sequence[socket.socket]) -> Iterator[None]:
    """Bytes that are sent wait until the context ends, at most 0.2 s."""
    try:
        for one in connections:
            _cork(one, True)
        yield
    finally:
        for one in connections:
            _cork(one, False)


def _cork(connection: socket.socket, on: bool) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)  # the kernel itself sends after 0.2 s


def corrupt(pid: int, but: int, garbage: bytes) -> int:
    """Sends garbage on the first of these connections that takes it, as if it came from the process."""
    with copies(pid, but) as found:
        for one in found:
            with contextlib.suppress(OSError):
                one.send(garbage, socket.MSG_DONTWAIT)  # a full connection would hold this process
                return 1
        return 0
