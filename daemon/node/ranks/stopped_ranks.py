"""Ranks of an elastic job that are stopped by a signal: after a while they are out. A debugger's stop does not count.

A rank that computes, waits or sleeps is never late, however long it takes: it may evaluate, or write a checkpoint. A
stopped one does nothing for anybody, and all others wait for it. It is ended, so that it can't wake up later and act as
if it were still a member.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from bagua.base.protocol import MAX_PATIENCE_S
from bagua.daemon.node.processes.proc import read_status

LOOK_EVERY_S = 1.0
LEAST_S = 5.0
STEPS = 8
UNKNOWN_S = 30.0
_LONGEST_LOOK_S = 2 * LOOK_EVERY_S
_STOPPED = "T"


def longest_stop(step_s: float) -> float:
    """Returns for how many seconds a rank may be stopped: eight training steps, 5 s at the least; 30 s while it is not
    known yet how long a step takes (0).
    """
    return max(LEAST_S, STEPS * step_s) if step_s else UNKNOWN_S


def patience(step_s: float) -> float:
    """Seconds for which hosts wait for a silent one: eight training steps, rounded up to 10, 20, 40 and on, for it is
    told to the coordinator and must rarely change. 0: it is not more than 5 s, or not known."""
    wanted = min(STEPS * step_s, MAX_PATIENCE_S)
    return min(LEAST_S * 2.0 ** math.ceil(math.log2(wanted / LEAST_S)), MAX_PATIENCE_S) if wanted > LEAST_S else 0.0


class LateRanks:
    """Clock of how long members have been stopped. Time counts while somebody looks: when this daemon was stopped
    itself, it has seen nothing.
    """

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._stopped: dict[int, float] = {}  # member -> seconds

    def look(self, now: float, stopped: Iterable[int], limit_s: float = LEAST_S) -> dict[int, float]:
        """Notes that these members are stopped now. Returns those that are late, with the seconds for which they were
        seen so: ``limit_s`` at the least.
        """
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        self._stopped = {member: self._stopped.get(member, -passed) + passed for member in stopped}
        return {member: seconds for member, seconds in self._stopped.items() if seconds >= limit_s}


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped the process."""
    status = read_status(pid)
    return status is not None and status.state == _STOPPED
