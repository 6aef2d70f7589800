"""The kernel's counts for this process: descriptors, threads, memory, ports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LISTENING = "0A"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # one is that of the list itself


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _sockets() -> set[str]:
    """Inodes of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def listening() -> set[tuple[str, int]]:
    """(address, port) at which this process listens for TCP: ``127.0.0.1`` or ``::1`` where it is that, else hex."""
    ours, found = _sockets(), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in ours:
                address, _, port = fields[1].partition(":")
                known = {"0100007F": "127.0.0.1", "00000000000000000000000001000000": "::1"}
                found.add((known.get(address, address), int(port, 16)))
    return found


def eventually(condition: Callable[[], bool], what: str, patience_s: float = 60.0) -> None:
    """Waits until ``condition`` holds: the kernel frees some things a little later than we are told."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
