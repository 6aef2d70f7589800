"""Ends what runs on this node when its lease is over, whether this process can still do it or not.

A process that wakes up looks at the facts first. Where this one stood still beyond the end of its lease, the
coordinator may have stood still as well: ranks are held (SIGSTOP) until it has answered, and go on if it has not given
them up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua.base.machine_clock import boottime
from bagua.daemon.node.keeper.link import KeeperLink
from bagua.daemon.node.session.lease import Lease

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


LOOK_S = 1.0  # between two looks at the clock: a suspended machine wakes up later than a timer believes
HOLD_S = 0.2  # between two looks at what is held: somebody else may have continued it
# Time in which a decision arrives that the coordinator, or another one on its database, took before it heard of this
# node.
SETTLE_S = 3.0


@dataclass
class Held:
    """A job whose ranks do nothing: its deadline, which was over when this process woke up, and when the coordinator
    was first heard since."""

    deadline: float
    heard: float = math.inf


class Fence:
    """``patience`` tells which jobs run here, each with its RunJob.patience_s; ``on_over(job_id, text)`` ends one; or
    else the keeper does, a process of its own. ``on_fence(job_id, at, held)`` tells ranks of one until when they may go
    on, whoever runs then; held: they are to do nothing."""

    def __init__(
        self,
        keeper: KeeperLink,
        patience: Callable[[], Mapping[str, float]],
        on_over: Callable[[str, str], None],
        on_fence: Callable[[str, float, bool], None],
        log: FilteringBoundLogger,
    ) -> None:
        self.lease = Lease(self.update)
        self._patience = patience
        self._on_over = on_over
        self._on_fence = on_fence
        self._log = log
        self._keeper = keeper
        # Deadlines told to the keeper last: of jobs that are not named, and of those; and until when ranks are held
        # rather. It may hold those of the daemon's last life.
        self._kept: tuple[float, dict[str, float], float] = (math.nan, {}, 0.0)
        self._told: set[str] = set()  # jobs that are being ended
        self._held: dict[str, Held] = {}
        self._shown: dict[str, tuple[float, bool]] = {}  # what ranks were told last
        self._over_at = 0.0  # the last deadline at which ranks were ended
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Looks at the lease until cancelled."""
        while True:
            self.over()
            now = boottime()
            ends = [self._end_of(name, patience_s) for name, patience_s in self._patience().items()]
            look_s = HOLD_S if self._held else LOOK_S
            wait_s = min(max(min(ends, default=math.inf) - now, 0.01), look_s) if ends else None
            self.lease.standstill.expect(math.inf if wait_s is None else now + wait_s)
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def over(self, job_id: str = "") -> bool:
        """True if the time of this job is over, or would be if it ran here; whatever runs beyond its time is being
        ended then. Call it before something is begun, and when a rank has ended: the keeper may have been first."""
        now = boottime()
        self.lease.look(now)
        self._keeper.hear()
        acted, spared = self._keeper.acted
        here = self._patience()
        self._told &= here.keys()
        ending = set() if acted <= self._over_at else here.keys() - spared
        self._over_at = max(self._over_at, acted)
        if self._hold(now, here) or self._let_go(now, here) or self._held:
            self.update()
        for name, patience_s in here.items():
            if now >= (deadline := self._end_of(name, patience_s)):
                self._over_at = max(self._over_at, deadline)
                ending.add(name)
        for name in ending:
            self._end(name, here[name])
        return now >= self.lease.deadline(here.get(job_id, 0.0))

    def _end_of(self, job_id: str, patience_s: float) -> float:
        """Returns when the job is ended here."""
        deadline = self.lease.deadline(patience_s)
        return max(deadline, self._held_until(patience_s)) if job_id in self._held else deadline

    def _held_until(self, patience_s: float) -> float:
        """Returns until when ranks are held rather than ended: a coordinator that stood still as well has the time of
        a fence to come back."""
        return self.lease.standstill.woke + self.lease.fence_s + patience_s

    def _hold(self, now: float, here: Mapping[str, float]) -> bool:
        """True if ranks are held from now on."""
        known = len(self._held)
        for name, patience_s in here.items():
            deadline = self.lease.deadline(patience_s)
            if name not in self._held and name not in self._told and deadline <= now < self._held_until(patience_s):
                self._held[name] = Held(deadline)
                self._log.warning("this node stood still: ranks are held until the coordinator has answered", job=name)
        return len(self._held) > known

    def _let_go(self, now: float, here: Mapping[str, float]) -> bool:
        """True if ranks go on: the coordinator has answered, and has not stopped their job, nor ended the stream, a
        while later."""
        known = len(self._held)
        answered = self.lease.answered > self.lease.standstill.woke
        for name, held in list(self._held.items()):
            if name not in here:
                del self._held[name]
            elif name in self._told or not answered or now >= self.lease.deadline(here[name]):
                held.heard = math.inf
            elif math.isinf(held.heard):
                held.heard = now
            elif now >= held.heard + SETTLE_S:
                del self._held[name]
                self._log.warning("the coordinator has answered: ranks go on", job=name)
        return len(self._held) < known

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
        self._hold(boottime(), here)
        deadlines = {name: self.lease.deadline(patience_s) for name, patience_s in here.items()}
        deadlines |= {name: held.deadline for name, held in self._held.items() if name in here}
        shown = {name: (at, name in self._held) for name, at in deadlines.items()}
        for name, (at, held) in shown.items():
            if held or self._shown.get(name) != (at, held):
                self._on_fence(name, at, held)
        self._shown = shown
        deadline = min(deadlines.values(), default=math.inf)
        later = {name: at for name, at in deadlines.items() if at > deadline}
        held_until = max((self._end_of(name, here[name]) for name in self._held if name in here), default=0.0)
        kept = (deadline, later, held_until)
        if kept != self._kept:
            self._keeper.set_deadline(deadline, later, held_until, self.lease.fence_s)
            self._kept = kept
            self._wake.set()
