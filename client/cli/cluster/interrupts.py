"""Signals that end a job of ``bagua run``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagua.cli.cluster.local_cluster import EmbeddedCluster, RunFolder
    from bagua.cli.display.follow import Follower


class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP: the first asks for the job's end, the second kills all at once."""

    def __init__(self, cluster: EmbeddedCluster, state: RunFolder) -> None:
        self.signal = 0
        self.reason = "stopped by the user"
        self.follower: Follower | None = None
        self.excuse: Callable[[], bool] = lambda: False  # whether a coordinator that is away has come to its end
        self._cluster = cluster
        self._state = state
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup means it
                signal.signal(number, lambda number, _: self.end(number))

    @property
    def exit_code(self) -> int:
        """Exit code by the shell's convention; 130 for Ctrl-C."""
        return 128 + self.signal

    def end(self, number: int) -> None:
        """Answers this signal. From another thread only while the job is followed."""
        if self.signal:
            job = self.follower.job if self.follower else None
            # The id of a rank that has ended may be another process's.
            self._cluster.kill([rank.pid for rank in job.ranks if rank.pid and not rank.exited_at] if job else [])
            self._state.remove()
            os._exit(self.exit_code)  # the way through the context managers waits for services, which are gone
        self.signal = number
        if self.follower is None:
            raise KeyboardInterrupt  # still starting: leave through the context managers
        from bagua.cli.display.follow import Interrupted

        self.follower.post(Interrupted())
