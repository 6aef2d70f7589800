"""What a process holds between ``init_process_group`` and its end. One session at a time."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.join.connection import Admission, Connection, DaemonClient
from bagua.torch_api.join.progress import ProgressReporter
from bagua.torch_api.join.shared_memory import SharedMemory
from bagua.torch_api.join.statistics import StatisticsRecorder

if TYPE_CHECKING:
    from bagua.torch_api.cuda.connection import CudaConnection
    from bagua.torch_api.join.torch_distributed import TorchGroup

SUBGROUPS = 0x80000000
"""Numbers of communicators from here on are hashes; see ``Session.make_communicator``."""


class Session:
    """Connection, memory and bookkeeping of this rank. ``daemon`` is None where a test hosts the engine itself."""

    def __init__(self, admission: Admission, daemon: DaemonClient | None) -> None:
        self.pid = os.getpid()
        self.membership = admission.membership
        self.data_socket = admission.data_socket
        describe = daemon.describe_waits if daemon is not None else None
        self.connection = Connection(admission.membership, admission.data_socket, admission.token, describe)
        self.memory = SharedMemory(self.connection)
        self.statistics = StatisticsRecorder()
        last_step = self.statistics.last_step
        self.progress = ProgressReporter(daemon, self.membership.rank, last_step) if daemon is not None else None
        everyone = sorted(rank for ranks in self.membership.hosts for rank in ranks)
        self.world = Communicator(0, everyone, self.membership.rank, self.connection)
        self._world_ids = 0
        self._counts: Counter[str] = Counter()
        self.devices: dict[int, CudaConnection] = {}  # by number, once a CUDA tensor has come
        self._endings: dict[object, Callable[[], None]] = {}

    def new_communicator(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of its own for ``ranks`` (global, this one among them). All members must make theirs in the
        same order; operations on different communicators need not be in the same order on all ranks."""
        members = sorted(ranks)
        if tuple(members) == self.world.ranks:
            return self.attach_communicator(self.next_world_id(), members)
        return self.make_communicator(f"{members} {self.count(str(members))}", members)

    def make_communicator(self, key: str, members: Sequence[int]) -> Communicator:
        """A communicator of some of the ranks whose number follows from ``key``, which its members choose alike and
        nobody chooses again. Raises CommunicationError if another one has the same number, as one in two thousand
        million pairs does."""
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return self.attach_communicator(SUBGROUPS | int.from_bytes(digest, "big") & SUBGROUPS - 1, members)

    def attach_communicator(self, id: int, members: Sequence[int]) -> Communicator:
        """This rank's end of communicator ``id``."""
        return Communicator(id, members, self.membership.rank, self.connection)

    def on_device(self, tensor: torch.Tensor) -> CudaConnection:
        """What carries tensors of this one's device. Raises BuildError or BaguaError with what is missing."""
        index = PORT.cuda.index(tensor.device)
        found = self.devices.get(index)
        if found is None:
            from bagua.torch_api.cuda.connection import CudaConnection

            found = self.devices[index] = CudaConnection(self.connection, index, self.statistics)
        return found

    def next_world_id(self) -> int:
        """The number of the next communicator of all ranks. All take it in the same order. The first fifteen are
        quicker than others: see csrc/channel/layout.h."""
        self._world_ids += 1
        return self._world_ids

    def count(self, key: str) -> int:
        """How often this was asked before."""
        self._counts[key] += 1
        return self._counts[key] - 1

    def end_first(self, key: object, end: Callable[[], None]) -> None:
        """``end()`` is called before this rank leaves the job in good order. All ranks that it concerns have the same
        in the same order, so that it may wait for them. ``forget_end`` takes it back."""
        self._endings[key] = end

    def forget_end(self, key: object) -> None:
        """What ``end_first`` was given under this key is not called any more."""
        self._endings.pop(key, None)

    def end(self) -> None:
        """Calls what ``end_first`` was given, in its order. For the moment before ``close``."""
        while self._endings and os.getpid() == self.pid:
            end = self._endings.pop(next(iter(self._endings)))
            with suppress(CommunicationError):  # the others have ended already, by an error
                end()

    def close(self) -> None:
        """Leaves the job in good order."""
        if os.getpid() != self.pid:
            return
        if self.progress is not None:
            self.progress.close()
        for device in self.devices.values():
            device.close()
        self.connection.close()


class _Current:
    """The session of the process, None before ``init_process_group`` and after ``destroy_process_group``."""

    session: Session | None = None
    torch_group: TorchGroup | None = None


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


def is_initialized() -> bool:
    """True between ``init_process_group`` and ``destroy_process_group``."""
    return CURRENT.session is not None


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """A contiguous tensor of zeros in memory that the daemon sees: primitives on it, or on contiguous parts of it,
    copy nothing.

    Like ``torch.empty``: ``empty(2, 3)`` or ``empty((2, 3))``, dtype float32 by default (``torch.get_default_dtype``).
    ``device``: another one than the CPU gives ``torch.zeros`` there, which is all that primitives need. Raises
    ValueError for negative sizes.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    if min(shape, default=0) < 0:
        raise ValueError(f"size is {list(shape)}: no dimension can be negative.")
    if device is not None and torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return current().memory.empty(shape.numel(), dtype or torch.get_default_dtype()).view(shape)


def report(step: int = 0, total: int = 0, metrics: Mapping[str, float] | None = None, message: str = "") -> None:
    """Tells the daemon how far the training is: ``bagua run`` and ``bagua job show`` display it.

    Returns at once; when reports come faster than four a second, only the newest goes out. Never
    fails the training: without a daemon, or in a forked child, nothing happens.
    """
    session = CURRENT.session
    if session is not None and session.progress is not None:
        session.progress.report(step, total, metrics or {}, message)
