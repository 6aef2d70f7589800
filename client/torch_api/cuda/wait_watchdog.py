"""Watches waits on a GPU, and gives up on ranks that live and never come. On the CPU ``Connection.wait`` does it.

Nothing waits on the host there, so a thread looks for how long the device has waited. It sleeps as long as no wait can
have become too long: half a minute, where the limit is not shorter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from bagua.base.errors import CommunicationError

SHORTEST_S = 0.05


class WaitWatchdog:
    """The thread, from its making to ``stop``."""

    def __init__(
        self,
        first_s: float,
        waiting: Callable[[], tuple[float, str]],
        go_on: Callable[[float, str], float],
        give_up: Callable[[str], None],
    ) -> None:
        """``first_s``: a wait that is shorter interests nobody. ``waiting``: for how many seconds this rank has been
        waiting, and a description of the wait. ``go_on``: is told of a long wait, and says how many seconds more it may
        take, or raises CommunicationError, whose words ``give_up`` gets. After that the thread ends."""
        self._first_s = first_s
        self._waiting = waiting
        self._go_on = go_on
        self._give_up = give_up
        self._pid = os.getpid()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bagua-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        limit, before, waited = self._first_s, 0.0, 0.0
        while not self._stopped.wait(max(limit - waited, SHORTEST_S)):
            waited, what = self._waiting()
            if waited < before:  # another wait
                limit = self._first_s
            before = waited
            if waited < limit:
                continue
            try:
                limit = waited + self._go_on(waited, what)
            except CommunicationError as error:
                self._give_up(str(error))
                return

    def stop(self) -> None:
        """Returns when the thread has ended. Idempotent. A forked child has no such thread."""
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        self._thread.join()
