"""Ends what runs on this node when its lease is over, whether this process can still do it or not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from bagua.daemon.node.keeper_link import KeeperLink
from bagua.daemon.node.lease import Lease, boottime

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


LOOK_S = 1.0  # between two looks at the clock: a suspended machine wakes up later than a timer believes


class Fence:
    """``busy`` tells whether anything runs here, ``on_over(text)`` ends it; or else the keeper does, a process of its
    own."""

    def __init__(
        self, keeper: KeeperLink, busy: Callable[[], bool], on_over: Callable[[str], None], log: FilteringBoundLogger
    ) -> None:
        self.lease = Lease(self.update)
        self._busy = busy
        self._on_over = on_over
        self._log = log
        self._keeper = keeper
        self._kept = math.nan  # told to the keeper last; it may hold a deadline of the daemon's last life
        self._told = False
        self._over_at = 0.0  # the last deadline at which ranks were ended
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Looks at the lease until cancelled."""
        while True:
            self.over()
            left = self.lease.deadline - boottime() if self._busy() else math.inf
            self._wake.clear()
            try:
                async with asyncio.timeout(None if math.isinf(left) else min(max(left, 0.01), LOOK_S)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def over(self) -> bool:
        """True if the lease is over: then whatever runs here is being ended. Call it before something is begun, and
        when a rank has ended: the keeper may have been first."""
        over = boottime() >= self.lease.deadline
        self._keeper.hear()
        acted = self._keeper.acted
        if not over and acted <= self._over_at:
            self._told = False
            return False
        self._over_at = self.lease.deadline if over else acted
        if self._busy():
            text = f"could not reach the coordinator for {self.lease.fence_s:g} s"
            if not self._told:
                self._log.error("the lease is over: ranks are ended", reason=text)
                self._told = True
            self._on_over(f"{text}: its ranks were ended, because the coordinator may have given them up")
        return over

    def update(self) -> None:
        """Lets the keeper know the deadline. Call it when something begins or ends to run here."""
        if not self.lease.known:
            return  # there may be ranks of the daemon's last life: its deadline holds
        deadline = self.lease.deadline if self._busy() else math.inf
        if deadline != self._kept:
            self._tell(deadline)
            self._wake.set()

    def _tell(self, deadline: float) -> None:
        self._keeper.set_deadline(deadline)
        self._kept = deadline
