"""Ends what runs on this node when its lease is over, whether this process can still do it or not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bagua.daemon.node.keeper.link import KeeperLink
from bagua.daemon.node.session.lease import Lease, boottime

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


LOOK_S = 1.0  # between two looks at the clock: a suspended machine wakes up later than a timer believes


class Fence:
    """``patience`` tells which jobs run here, each with its RunJob.patience_s; ``on_over(job_id, text)`` ends one; or
    else the keeper does, a process of its own."""

    def __init__(
        self,
        keeper: KeeperLink,
        patience: Callable[[], Mapping[str, float]],
        on_over: Callable[[str, str], None],
        log: FilteringBoundLogger,
    ) -> None:
        self.lease = Lease(self.update)
        self._patience = patience
        self._on_over = on_over
        self._log = log
        self._keeper = keeper
        # Deadlines told to the keeper last: of jobs without patience, and of the others. It may hold those of the
        # daemon's last life.
        self._kept: tuple[float, dict[str, float]] = (math.nan, {})
        self._told: set[str] = set()  # jobs that are being ended
        self._over_at = 0.0  # the last deadline at which ranks were ended
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Looks at the lease until cancelled."""
        while True:
            self.over()
            left = min(map(self.lease.deadline, self._patience().values()), default=math.inf) - boottime()
            self._wake.clear()
            try:
                async with asyncio.timeout(None if math.isinf(left) else min(max(left, 0.01), LOOK_S)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def over(self, job_id: str = "") -> bool:
        """True if the time of this job is over, or would be if it ran here; whatever runs beyond its time is being
        ended then. Call it before something is begun, and when a rank has ended: the keeper may have been first."""
        now = boottime()
        self._keeper.hear()
        acted, spared = self._keeper.acted
        here = self._patience()
        self._told &= here.keys()
        ending = set() if acted <= self._over_at else here.keys() - spared
        self._over_at = max(self._over_at, acted)
        for name, patience_s in here.items():
            if now >= (deadline := self.lease.deadline(patience_s)):
                self._over_at = max(self._over_at, deadline)
                ending.add(name)
        for name in ending:
            self._end(name, here[name])
        return now >= self.lease.deadline(here.get(job_id, 0.0))

    def _end(self, job_id: str, patience_s: float) -> None:
        text = f"could not reach the coordinator for {self.lease.fence_s + patience_s:g} s"
        if job_id not in self._told:
            self._log.error("the lease is over: ranks are ended", job=job_id, reason=text)
            self._told.add(job_id)
        self._on_over(job_id, f"{text}: its ranks were ended, because the coordinator may have given them up")

    def update(self) -> None:
        """Lets the keeper know the deadlines. Call it when something begins or ends to run here, or has another
        patience."""
        if not self.lease.known:
            return  # there may be ranks of the daemon's last life: its deadlines hold
        here = self._patience()
        deadline = self.lease.deadline() if here else math.inf
        later = {name: self.lease.deadline(patience_s) for name, patience_s in here.items() if patience_s}
        if (deadline, later) != self._kept:
            self._keeper.set_deadline(deadline, later)
            self._kept = (deadline, later)
            self._wake.set()
