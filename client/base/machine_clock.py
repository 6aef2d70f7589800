"""Clocks of this machine: one that goes on while it is suspended, the notice of a standstill, and the name of its
CLOCK_MONOTONIC."""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path

STANDSTILL_S = 2.0  # a look that comes later than it was due by no more shows a slow machine


def boottime() -> float:
    """Seconds on the clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Standstill:
    """Notices that this process stood still for longer than ``least_s``: a signal had stopped it, or its machine slept
    or was moved. Times are those of ``boottime``."""

    def __init__(self) -> None:
        self.least_s = STANDSTILL_S
        self._due = math.inf
        self.woke = -math.inf  # when that was noticed last

    def matters_to(self, fence_s: float) -> None:
        """Notices from now on what is long for a lease that lasts so long."""
        self.least_s = max(STANDSTILL_S, fence_s / 8)

    def expect(self, at: float) -> None:
        """Notes that the next look is due at that time; inf: at none."""
        self._due = at

    def look(self, now: float) -> bool:
        """True if the process has stood still since the last look."""
        if now <= self._due + self.least_s:
            return False
        self._due, self.woke = math.inf, now  # told once for each standstill
        return True


@cache
def clock_name() -> str:
    """Equal for all processes that share one CLOCK_MONOTONIC, whose times can be compared directly: same kernel, same
    boot, same time namespace. Empty where that can't be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""
