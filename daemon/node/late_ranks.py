"""Ranks of an elastic job that are stopped by a signal: after a while they are out. A debugger's stop does not count.

A rank that computes, waits or sleeps is never late, however long it takes: it may evaluate, or write a checkpoint. A
stopped one does nothing for anybody, and all others wait for it. It is ended, so that it can't wake up later and act as
if it were still a member.
"""

from __future__ import annotations

from collections.abc import Iterable

from bagua.daemon.node.proc import read_status

LOOK_EVERY_S = 1.0
LEAST_S = 5.0
STEPS = 8
_LONGEST_LOOK_S = 2 * LOOK_EVERY_S
_STOPPED = "T"


class LateRanks:
    """For how long members have been stopped. Time counts while somebody looks: when this daemon was stopped itself, it
    has seen nothing."""

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._stopped: dict[int, float] = {}  # member -> seconds

    def look(self, now: float, stopped: Iterable[int], step_s: float = 0.0) -> dict[int, float]:
        """These members are stopped now. Returns those that are late, with the seconds for which they were seen so: as
        long as eight steps of ``step_s``, and 5 s at the least."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        self._stopped = {member: self._stopped.get(member, -passed) + passed for member in stopped}
        limit = max(LEAST_S, STEPS * step_s)
        return {member: seconds for member, seconds in self._stopped.items() if seconds >= limit}


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    status = read_status(pid)
    return status is not None and status.state == _STOPPED
