"""Communicators: ranks that communicate among themselves, with every primitive as a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.algorithms.codec import Codec
from bagua.torch_api.comm.block_exchange import RankBlocks, exchange_blocks
from bagua.torch_api.comm.checks import Blocks, check_codec, check_peer, check_root, pair
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import Carried, ReduceOp, check_reduction, check_tensor, transfer
from bagua.torch_api.job.session import Session, current


class World:
    """The type of ``CommMember.WORLD``: all ranks of the job, as ``comm=None``."""

    def __repr__(self) -> str:
        return "WORLD"


WORLD = World()


class Communicator(Members):
    """Ranks of the job, and the operations among them: see ``bagua.torch_api.communication``.

    Methods take tensors, and results of ``tensor.bagua_backend_tensor()``. Positions (``rank()``, roots, peers) count
    from 0 in the order of ``ranks``, which are global numbers.
    """

    def _session(self) -> Session:
        """The session of this process. Raises CommunicationError if this communicator was aborted, BaguaError if it
        belongs to a session that has ended."""
        session = current()
        if self._aborted or self.connection is not session.connection:
            self.check_usable(session.connection)
        return session

    # Primitives. Each does what the function of its name in ``bagua.torch_api.communication`` says.

    def barrier(self) -> None:
        self._session().connection.barrier(self.id)

    def send(self, tensor: Carried, dst: int) -> None:
        session = self._session()
        check_peer(dst, self, "dst")
        tensor = check_tensor(tensor)
        transfer(session, "send", tensor, None, tensor.numel(), self, root=dst)

    def recv(self, tensor: Carried, src: int) -> None:
        session = self._session()
        check_peer(src, self, "src")
        tensor = check_tensor(tensor)
        transfer(session, "recv", None, tensor, tensor.numel(), self, root=src)

    def broadcast(self, tensor: Carried, src: int = 0) -> None:
        session = self._session()
        at_root = self.rank() == check_root(src, self, "src")
        tensor = check_tensor(tensor)
        give, take = (tensor, None) if at_root else (None, tensor)
        transfer(session, "broadcast", give, take, tensor.numel(), self, root=src, together=at_root)

    def allreduce(
        self,
        send_tensor: Carried,
        recv_tensor: Carried,
        op: ReduceOp = ReduceOp.SUM,
        *,
        codec: Codec | str | None = None,
    ) -> None:
        session = self._session()
        send, recv, count = pair(send_tensor, recv_tensor)
        op = check_reduction(send.dtype, op)
        encoding = None if codec is None else check_codec(codec, send.dtype, op)
        transfer(session, "allreduce", send, recv, count, self, op=op, together=True, codec=encoding)

    def allreduce_inplace(
        self, tensor: Carried, op: ReduceOp = ReduceOp.SUM, *, codec: Codec | str | None = None
    ) -> None:
        session = self._session()
        tensor = check_tensor(tensor)
        op = check_reduction(tensor.dtype, op)
        encoding = None if codec is None else check_codec(codec, tensor.dtype, op)
        count = tensor.numel()
        transfer(session, "allreduce", tensor, tensor, count, self, op=op, together=True, codec=encoding)

    def reduce(self, send_tensor: Carried, recv_tensor: Carried, dst: int, op: ReduceOp = ReduceOp.SUM) -> None:
        session = self._session()
        at_root = self.rank() == check_root(dst, self, "dst")
        send, recv, count = pair(send_tensor, recv_tensor)
        op = check_reduction(send.dtype, op)
        result = recv if at_root else None
        transfer(session, "reduce", send, result, count, self, op=op, root=dst, together=at_root)

    def reduce_inplace(self, tensor: Carried, dst: int, op: ReduceOp = ReduceOp.SUM) -> None:
        self.reduce(tensor, tensor, dst, op)

    def allgather(self, send_tensor: Carried, recv_tensor: Carried) -> None:
        session = self._session()
        n = self.nranks()
        send, recv, count = pair(send_tensor, recv_tensor, 1, n)
        transfer(session, "allgather", send, recv, count, self, recv_rows=n)

    def allgather_inplace(self, tensor: Carried) -> None:
        self._session()
        whole = Blocks.of(tensor, self)
        self.allgather(whole.block(self.rank()), whole.flat)
        whole.close()

    def gather(self, send_tensor: Carried, recv_tensor: Carried, dst: int) -> None:
        session = self._session()
        check_root(dst, self, "dst")
        n = self.nranks()
        send, recv, count = pair(send_tensor, recv_tensor, 1, n)
        result = recv if self.rank() == dst else None
        transfer(session, "gather", send, result, count, self, recv_rows=n, root=dst)

    def gather_inplace(self, tensor: Carried, count: int, dst: int) -> None:
        session = self._session()
        at_root = self.rank() == check_root(dst, self, "dst")
        n = self.nranks()
        whole = Blocks.counted(tensor, count, n if at_root else 1)
        own, result = (whole.block(self.rank()), whole.flat) if at_root else (whole.flat, None)
        transfer(session, "gather", own, result, count, self, recv_rows=n, root=dst)
        if at_root:
            whole.close()

    def scatter(self, send_tensor: Carried, recv_tensor: Carried, src: int) -> None:
        session = self._session()
        check_root(src, self, "src")
        n = self.nranks()
        send, recv, count = pair(send_tensor, recv_tensor, n, 1)
        blocks = send if self.rank() == src else None
        transfer(session, "scatter", blocks, recv, count, self, send_rows=n, root=src)

    def scatter_inplace(self, tensor: Carried, count: int, src: int) -> None:
        session = self._session()
        at_root = self.rank() == check_root(src, self, "src")
        n = self.nranks()
        whole = Blocks.counted(tensor, count, n if at_root else 1)
        blocks, own = (whole.flat, whole.block(self.rank())) if at_root else (None, whole.flat)
        transfer(session, "scatter", blocks, own, count, self, send_rows=n, root=src)
        if not at_root:
            whole.close()

    def reduce_scatter(self, send_tensor: Carried, recv_tensor: Carried, op: ReduceOp = ReduceOp.SUM) -> None:
        session = self._session()
        n = self.nranks()
        send, recv, count = pair(send_tensor, recv_tensor, n, 1)
        op = check_reduction(send.dtype, op)
        transfer(session, "reduce_scatter", send, recv, count, self, send_rows=n, op=op)

    def reduce_scatter_inplace(self, tensor: Carried, op: ReduceOp = ReduceOp.SUM) -> None:
        self._session()
        whole = Blocks.of(tensor, self)
        self.reduce_scatter(whole.flat, whole.block(self.rank()), op)
        whole.close()

    def alltoall(self, send_tensor: Carried, recv_tensor: Carried) -> None:
        session = self._session()
        n = self.nranks()
        send, recv, count = pair(send_tensor, recv_tensor, n, n)
        transfer(session, "alltoall", send, recv, count, self, send_rows=n, recv_rows=n)

    def alltoall_inplace(self, tensor: Carried) -> None:
        self._session()
        whole = Blocks.of(tensor, self)
        # A clone: blocks are written while others are still read.
        self.alltoall(whole.tensor.detach().clone(), whole.tensor)

    def alltoall_v(
        self,
        send_tensor: Carried,
        send_counts: Sequence[int],
        send_displs: Sequence[int],
        recv_tensor: Carried,
        recv_counts: Sequence[int],
        recv_displs: Sequence[int],
    ) -> None:
        session = self._session()
        gives = RankBlocks.of(send_tensor, send_counts, send_displs, self.nranks(), "send")
        takes = RankBlocks.of(recv_tensor, recv_counts, recv_displs, self.nranks(), "recv")
        exchange_blocks(session, self, gives, takes)

    def alltoall_v_inplace(self, tensor: Carried, counts: Sequence[int], displs: Sequence[int]) -> None:
        self.alltoall_v(tensor, counts, displs, tensor, counts, displs)


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
        """Does nothing: it stands for all communicators of others."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Other processes communicate."""

    barrier = send = recv = broadcast = _nothing
    allreduce = allreduce_inplace = reduce = reduce_inplace = reduce_scatter = reduce_scatter_inplace = _nothing
    allgather = allgather_inplace = gather = gather_inplace = scatter = scatter_inplace = _nothing
    alltoall = alltoall_inplace = alltoall_v = alltoall_v_inplace = _nothing


NON_COMM_MEMBER = NonMember()
Comm = Communicator | World | None
"""The type of ``comm`` of primitives: a communicator, or None or ``CommMember.WORLD`` for all ranks."""
