"""The two clocks: the service clock for deadlines and leases, the wall clock for people.

The service clock counts seconds during which a coordinator was awake. It never goes back, it knows nothing of the date,
it stands still while no coordinator runs or while this one is frozen (a suspended machine, a starved processor), and
what is stored by it means the same after a restart: its reading is kept in the database. So a wall clock that is set, a
restart and a stalled process make no deadline come early, and no node is blamed for a time in which nobody listened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from bagua.base.machine_clock import boottime

START = 1.0  # the first reading: 0 means "not yet" in records


class ServiceClock:
    """``tick`` must be called every ``tick_s``: of a longer pause two ticks count. ``woke``: the reading after the last
    one."""

    def __init__(
        self,
        tick_s: float,
        monotonic: Callable[[], float] = boottime,  # it counts a suspended machine's time, too: a pause that is seen
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.tick_s = tick_s
        self._monotonic = monotonic
        self._wall = wall
        self._reading = START
        self._at = monotonic()
        self.woke = -math.inf

    def now(self) -> float:
        """Seconds that coordinators of this database were awake."""
        return self._reading + min(max(0.0, self._monotonic() - self._at), 2 * self.tick_s)

    def wall(self) -> float:
        """Seconds since the epoch, for people."""
        return self._wall()

    def tick(self) -> None:
        self._reading, before = self.now(), self._at
        self._at = self._monotonic()
        if self._at > before + 2 * self.tick_s:
            self.woke = self._reading

    def catch_up(self, reading: float) -> float:
        """The clock shows at least ``reading``: that of a former run, or of another coordinator. Returns by how much it
        was put forward: a time in which this coordinator listened to nobody."""
        jump = max(0.0, reading - self.now())
        if jump:
            self._reading = reading
            self._at = self._monotonic()
        return jump
