"""What a process holds between ``init_process_group`` and its end. One session at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bagua.base.errors import BaguaError
from bagua.torch_api.connection import Admission, Connection, DaemonClient
from bagua.torch_api.memory import SharedMemory
from bagua.torch_api.progress import ProgressReporter
from bagua.torch_api.statistics import StatisticsRecorder


class Communicator:
    """Ranks that communicate among themselves. Positions in it (``rank()``, roots) count from 0 in the order of
    ``ranks``."""

    def __init__(self, id: int, ranks: Sequence[int], global_rank: int) -> None:
        self.id = id
        self.ranks = tuple(ranks)
        self._rank = self.ranks.index(global_rank)

    def rank(self) -> int:
        """Position of this process."""
        return self._rank

    def nranks(self) -> int:
        """Number of members."""
        return len(self.ranks)


class Session:
    """Connection, memory and bookkeeping of this rank. ``daemon`` is None where a test hosts the engine itself."""

    def __init__(self, admission: Admission, daemon: DaemonClient | None) -> None:
        self.pid = os.getpid()
        self.membership = admission.membership
        describe = daemon.describe_waits if daemon is not None else None
        self.connection = Connection(admission.membership, admission.data_socket, admission.token, describe)
        self.memory = SharedMemory(self.connection)
        self.statistics = StatisticsRecorder()
        last_step = self.statistics.last_step
        self.progress = ProgressReporter(daemon, self.membership.rank, last_step) if daemon is not None else None
        everyone = sorted(rank for ranks in self.membership.hosts for rank in ranks)
        self.world = Communicator(0, everyone, self.membership.rank)
        self._communicators = 0

    def new_communicator(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of its own for ``ranks`` (global, this one among them). All members must make theirs in the
        same order; operations on different communicators need not be in the same order on all ranks."""
        self._communicators += 1
        made = Communicator(self._communicators, sorted(ranks), self.membership.rank)
        self.connection.create_comm(made.id, made.ranks)
        return made

    def close(self) -> None:
        """Leaves the job in good order."""
        if os.getpid() != self.pid:
            return
        if self.progress is not None:
            self.progress.close()
        self.connection.close()


class _Current:
    """The session of the process, None before ``init_process_group`` and after ``destroy_process_group``."""

    session: Session | None = None


CURRENT = _Current()


def current() -> Session:
    """The session of this process. Raises BaguaError before ``init_process_group`` and in a forked child."""
    session = CURRENT.session
    if session is None:
        raise BaguaError("bagua is not initialised in this process: call bagua.torch_api.init_process_group() first.")
    if session.pid != os.getpid():
        raise BaguaError(
            f"This process was forked from rank {session.membership.rank}: a forked child can't communicate. Start a "
            "process of its own and call init_process_group() there."
        )
    return session
