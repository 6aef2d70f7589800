"""Waits that count no time in which this machine was too slow: a wait for an effect is over by what could have happened
meanwhile, and not by the clock alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from bagua.base.errors import ServiceError

TO_NOTICE_S = 60.0  # a fault that is told nowhere ends at the latest after so long
MOST = 10  # times as long a wait may take on a machine that is slow
LOOK_S = 1.0


def until(condition: Callable[[], bool], what: str, within_s: float = TO_NOTICE_S) -> None:
    """Waits. Raises ServiceError if that takes too long, not counted in which children of this process had to wait for
    a processor."""
    starved = Starved()
    began = looked = time.monotonic()
    lost = 0.0
    while not condition():
        now = time.monotonic()
        if now - looked >= LOOK_S:
            lost += min(now - looked, starved.more())  # several threads may have waited at once
            looked = now
        if now - began > min(within_s + lost, MOST * within_s):
            slow = f" ({lost:.0f} s more than that, in which they had no processor)" if lost >= 1 else ""
            raise ServiceError(f"Not within {within_s:g} s{slow}: {what}. [BG003]")
        time.sleep(0.05)


class Starved:
    """Seconds in which threads of processes below this one were ready and had no processor, since the last look."""

    def __init__(self) -> None:
        self._waited = waited(descendants(os.getpid()))

    def more(self) -> float:
        """Returns the sum of all threads; it can be more than the time that has passed."""
        before, self._waited = self._waited, waited(descendants(os.getpid()))
        return sum(max(0, now - before.get(thread, 0)) for thread, now in self._waited.items()) / 1e9


def descendants(pid: int) -> list[int]:
    """Processes below this one, parents first."""
    found, left = [], [pid]
    while left:
        with contextlib.suppress(OSError):  # it has ended
            for task in Path(f"/proc/{left.pop()}/task").iterdir():
                # Each thread lists the children that it has made.
                below = [int(word) for word in (task / "children").read_text().split()]
                found += below
                left += below
    return found


def waited(pids: list[int]) -> dict[int, int]:
    """Nanoseconds that each thread has waited for a processor; empty where the kernel does not count them."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1])
    return found


def alive(pid: int) -> bool:
    """True if there is such a process that has not ended."""
    try:
        # A name may hold brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
