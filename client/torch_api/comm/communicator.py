"""Ranks that communicate among themselves, as objects: who they are, and every primitive as a method."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.join import environment

if TYPE_CHECKING:
    from bagua.torch_api.compat.tensor import BackendTensor
    from bagua.torch_api.cuda.connection import CudaConnection
    from bagua.torch_api.join.connection import Connection

    Carried = torch.Tensor | BackendTensor


class World:
    """The type of ``CommMember.WORLD``: all ranks of the job, as ``comm=None``."""

    def __repr__(self) -> str:
        return "WORLD"


WORLD = World()


class Communicator:
    """Positions in it (``rank()``, roots, peers) count from 0 in the order of ``ranks``, which are global numbers.

    Its methods are the primitives of ``bagua.torch_api.communication`` with ``comm`` set to it: see there. They take
    tensors, and what ``tensor.bagua_backend_tensor()`` returns.

    One that a session made lives in the daemon until the last reference to it is gone, or ``destroy`` is called.
    Members may drop it at different moments. ``connection`` is None where somebody else looks after it.
    """

    def __init__(
        self, id: int, ranks: Sequence[int], global_rank: int, connection: Connection | CudaConnection | None = None
    ) -> None:
        self.id = id
        self.ranks = tuple(ranks)
        self.connection = connection
        self.stream: torch.cuda.Stream | None = None  # of its group; None: the current one
        self.twins: dict[int, Communicator] = {}  # by device: what carries CUDA tensors among the same ranks
        self._rank = self.ranks.index(global_rank) if global_rank in self.ranks else -1
        self._aborted = False
        self._destroy = None
        if connection is not None and id != 0:
            connection.create_comm(id, self.ranks)
            self._destroy = weakref.finalize(self, _destroy_quietly, connection, id)
            self._destroy.atexit = False  # the session's end is the communicators' end

    def __repr__(self) -> str:
        return f"Communicator(ranks={list(self.ranks)}, rank={self._rank})"

    def rank(self) -> int:
        """Position of this process; -1 if it is no member."""
        return self._rank

    def nranks(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def device_id(self) -> int:
        """Number of this rank's device on its host: LOCAL_RANK."""
        return environment.get_local_rank()

    @property
    def cuda_stream(self) -> Any:
        """The CUDA stream in whose order it carries CUDA tensors: that of its group, else the current one; 0 where CUDA
        is not in use."""
        if self.stream is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self.stream or 0
        return torch.cuda.current_stream()

    def destroy(self) -> None:
        """Gives it back to the daemon: this rank will not use it any more. Idempotent."""
        for twin in self.twins.values():
            twin.destroy()
        self.twins.clear()
        if self._destroy is not None:
            self._destroy()

    def abort(self) -> None:
        """Ends it on this rank: whatever is called on it from now on raises CommunicationError. Other communicators go
        on. Returns at once; an operation that waits in another thread goes on waiting.

        All members call it, each when it notices that something is wrong. A member that goes on alone waits for this
        one, and is told about it by name every minute (``bagua`` log), until this process leaves the job: then its
        operation fails. Aborting the communicator of all ranks leaves this rank nothing but to leave the job.
        """
        self._aborted = True

    def check_abort(self) -> bool:
        """Whether it was aborted on this rank."""
        return self._aborted

    def check_usable(self, connection: Connection) -> None:
        """Raises CommunicationError if it was aborted, BaguaError if it belongs to a session that has ended."""
        if self._aborted:
            raise CommunicationError(
                f"The communicator of ranks {list(self.ranks)} was aborted on this rank. Make a new group and use its "
                "communicators."
            )
        if self.connection is not None and self.connection is not connection:
            raise BaguaError(
                f"The communicator of ranks {list(self.ranks)} was made before destroy_process_group(): make a new one."
            )

    # Primitives

    def barrier(self) -> None:
        _primitives().barrier(self)

    def send(self, tensor: Carried, dst: int) -> None:
        _primitives().send(_plain(tensor), dst, self)

    def recv(self, tensor: Carried, src: int) -> None:
        _primitives().recv(_plain(tensor), src, self)

    def broadcast(self, tensor: Carried, src: int = 0) -> None:
        _primitives().broadcast(_plain(tensor), src, self)

    def allreduce(self, send_tensor: Carried, recv_tensor: Carried, op: int = 0) -> None:
        _primitives().allreduce(_plain(send_tensor), _plain(recv_tensor), op, self)

    def allreduce_inplace(self, tensor: Carried, op: int = 0) -> None:
        _primitives().allreduce_inplace(_plain(tensor), op, self)

    def reduce(self, send_tensor: Carried, recv_tensor: Carried, dst: int, op: int = 0) -> None:
        _primitives().reduce(_plain(send_tensor), _plain(recv_tensor), dst, op, self)

    def reduce_inplace(self, tensor: Carried, dst: int, op: int = 0) -> None:
        _primitives().reduce_inplace(_plain(tensor), dst, op, self)

    def allgather(self, send_tensor: Carried, recv_tensor: Carried) -> None:
        _primitives().allgather(_plain(send_tensor), _plain(recv_tensor), self)

    def allgather_inplace(self, tensor: Carried) -> None:
        _primitives().allgather_inplace(_plain(tensor), self)

    def gather(self, send_tensor: Carried, recv_tensor: Carried, dst: int) -> None:
        _primitives().gather(_plain(send_tensor), _plain(recv_tensor), dst, self)

    def gather_inplace(self, tensor: Carried, count: int, dst: int) -> None:
        _primitives().gather_inplace(_plain(tensor), count, dst, self)

    def scatter(self, send_tensor: Carried, recv_tensor: Carried, src: int) -> None:
        _primitives().scatter(_plain(send_tensor), _plain(recv_tensor), src, self)

    def scatter_inplace(self, tensor: Carried, count: int, src: int) -> None:
        _primitives().scatter_inplace(_plain(tensor), count, src, self)

    def reduce_scatter(self, send_tensor: Carried, recv_tensor: Carried, op: int = 0) -> None:
        _primitives().reduce_scatter(_plain(send_tensor), _plain(recv_tensor), op, self)

    def reduce_scatter_inplace(self, tensor: Carried, op: int = 0) -> None:
        _primitives().reduce_scatter_inplace(_plain(tensor), op, self)

    def alltoall(self, send_tensor: Carried, recv_tensor: Carried) -> None:
        _primitives().alltoall(_plain(send_tensor), _plain(recv_tensor), self)

    def alltoall_inplace(self, tensor: Carried) -> None:
        _primitives().alltoall_inplace(_plain(tensor), self)

    def alltoall_v(
        self,
        send_tensor: Carried,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv_tensor: Carried,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        _primitives().alltoall_v(
            _plain(send_tensor), send_counts, send_displs, _plain(recv_tensor), recv_counts, recv_displs, self
        )

    def alltoall_v_inplace(self, tensor: Carried, counts: Sequence[int], displs: Sequence[int]) -> None:
        _primitives().alltoall_v_inplace(_plain(tensor), counts, displs, self)


class NonMember(Communicator):
    """The type of ``CommMember.NON_COMM_MEMBER``: stands for a communicator that this process is no member of.
    Primitives on it return at once. It is false."""

    def __init__(self) -> None:
        super().__init__(0, (), -1)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NON_COMM_MEMBER"

    def abort(self) -> None:
        """Nothing: it stands for all communicators of others."""


NON_COMM_MEMBER = NonMember()
Comm = Communicator | World | None
"""What primitives take as ``comm``: a communicator, or None or ``CommMember.WORLD`` for all ranks."""


def _destroy_quietly(connection: Connection | CudaConnection, id: int) -> None:
    """Silent when the session has ended, and with it the communicator."""
    with suppress(CommunicationError):
        connection.destroy_comm(id)


def _plain(tensor: Carried) -> torch.Tensor:
    """The tensor that travels."""
    given: Any = tensor
    found: torch.Tensor = given if isinstance(given, torch.Tensor) else getattr(given, "tensor", given)
    return found


def _primitives() -> ModuleType:
    from bagua.torch_api import communication  # which is made of what is here

    return communication
