"""Ends what runs on this node when its lease is over, whether this process can still do it or not."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from bagua.daemon.node.keeper import DEADLINE, LOOK_S
from bagua.daemon.node.lease import Lease, boottime

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class Fence:
    """``busy`` tells whether anything runs here, ``on_over(text)`` ends it. The keeper, a process of its own, is there
    while something runs."""

    def __init__(self, busy: Callable[[], bool], on_over: Callable[[str], None], log: FilteringBoundLogger) -> None:
        self.lease = Lease(self.update)
        self._busy = busy
        self._on_over = on_over
        self._log = log
        self._keeper: subprocess.Popen[bytes] | None = None
        self._kept = math.inf  # what the keeper was told last
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
                self.update()  # a keeper that has died is replaced

    def over(self) -> bool:
        """True if the lease is over: then whatever runs here is being ended. Call it before something is begun, and
        when a rank has ended: the keeper may have been first."""
        over = boottime() >= self.lease.deadline
        acted = self._keeper_acted()
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
        deadline = self.lease.deadline if self._busy() else math.inf
        if self._keeper is not None and self._keeper.poll() is not None:
            self._log.warning("the keeper of ranks has ended, another one is started")
            self.close()
        if deadline != self._kept:
            self._tell(deadline)
            self._wake.set()

    def close(self) -> None:
        """Ends the keeper. Idempotent."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            assert self._keeper.stdout is not None
            self._keeper.stdin.close()
            self._keeper.stdout.close()
            self._keeper.kill()
            self._keeper.wait()
        self._keeper, self._kept = None, math.inf

    def _keeper_acted(self) -> float:
        """The deadline at which the keeper ended ranks; 0: it has not said so since the last call. An acknowledgement
        that a stopped daemon reads only when it goes on moves its deadline; then the clock no longer tells the reason.
        """
        if self._keeper is None:
            return 0.0
        assert self._keeper.stdout is not None
        try:
            said = os.read(self._keeper.stdout.fileno(), DEADLINE.size * 512)
        except BlockingIOError:
            return 0.0
        return float(DEADLINE.unpack(said[-DEADLINE.size :])[0]) if said else 0.0

    def _tell(self, deadline: float) -> None:
        try:
            if self._keeper is None:
                self._keeper = _start_keeper()
            assert self._keeper.stdin is not None
            os.write(self._keeper.stdin.fileno(), DEADLINE.pack(deadline))
            self._kept = deadline
        except OSError as error:  # BlockingIOError: a keeper that is stopped; it is told again within a second
            self._log.warning("the keeper of ranks does not hear", error=str(error))


def _start_keeper() -> subprocess.Popen[bytes]:
    """In a session of its own: what stops the daemon from its terminal must not stop the keeper. Raises OSError."""
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "bagua.daemon.node.keeper", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    for pipe in (keeper.stdin, keeper.stdout):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    return keeper
