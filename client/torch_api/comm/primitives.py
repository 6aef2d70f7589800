"""Collective and point-to-point operations on tensors, in the signatures of the original.

All are synchronous: when they return, the result is there; on CUDA tensors, for all later work of the current stream,
and an error may come with a later call. ``comm`` is a communicator, or None for all ranks; roots and
peers are positions in it. On a process that is no member (``CommMember.NON_COMM_MEMBER``) nothing happens. Tensors lie
on the CPU or on a CUDA device and may have any shape and be non-contiguous. A tensor made by ``empty`` lies in memory
that the daemon sees: nothing is copied on its way.

Sizes are checked before anything is sent (ValueError), and so are types (TypeError). CommunicationError tells of ranks
that called different things, of a lost rank or host, and of a stopped job; the tensor that gets the result may then
hold parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.algorithms.codec import Codec
from bagua.torch_api.comm.communicator import Comm
from bagua.torch_api.comm.communicators import communicator_of
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.session import current
from bagua.torch_api.job.statistics import Statistics


def barrier(comm: Comm = None) -> None:
    """Returns when every rank has called it. Operations of buckets that were begun before may still be under way."""
    communicator_of(comm).barrier()


def send(tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """Sends ``tensor`` to rank ``dst``, which must receive one of the same size and dtype. Returns when it has
    arrived."""
    communicator_of(comm).send(tensor, dst)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """Receives into ``tensor`` the tensor that rank ``src`` sends."""
    communicator_of(comm).recv(tensor, src)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None) -> None:
    """``tensor`` of rank ``src`` replaces that of every rank. Same size and dtype everywhere."""
    communicator_of(comm).broadcast(tensor, src)


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    codec: Codec | str | None = None,
) -> None:
    """``recv_tensor`` = reduction of all ranks' ``send_tensor``, the same bits on every rank. Equal sizes.

    ``codec``: how float32 that is summed or averaged crosses between hosts, without error feedback; see
    ``bagua.algorithms.codec.Codec``. Inside a host nothing is encoded.
    """
    communicator_of(comm).allreduce(send_tensor, recv_tensor, op, codec=codec)


def allreduce_inplace(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    codec: Codec | str | None = None,
) -> None:
    """``tensor`` = reduction of all ranks' ``tensor``. ``codec``: see ``allreduce``."""
    communicator_of(comm).allreduce_inplace(tensor, op, codec=codec)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """``recv_tensor`` of rank ``dst`` = reduction of all ranks' ``send_tensor``; other ranks' stays as it is. Equal
    sizes."""
    communicator_of(comm).reduce(send_tensor, recv_tensor, dst, op)


def reduce_inplace(tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """``tensor`` of rank ``dst`` = reduction of all ranks' ``tensor``."""
    communicator_of(comm).reduce_inplace(tensor, dst, op)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """``recv_tensor`` = all ranks' ``send_tensor``, one after the other; it is as many times larger as there are
    ranks."""
    communicator_of(comm).allgather(send_tensor, recv_tensor)


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """Gathers every rank's own block of ``tensor`` on all ranks. Block number ``rank`` of equal blocks, one for each
    rank."""
    communicator_of(comm).allgather_inplace(tensor)


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """``recv_tensor`` of rank ``dst`` = all ranks' ``send_tensor``, one after the other; other ranks' stays as it is.

    On every rank it is as many times larger as there are ranks.
    """
    communicator_of(comm).gather(send_tensor, recv_tensor, dst)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """On rank ``dst``, ``tensor`` has a block of ``count`` elements for each rank, gives its own and gets the others'.

    On other ranks it has ``count`` elements, which go to ``dst``.
    """
    communicator_of(comm).gather_inplace(tensor, count, dst)


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """``recv_tensor`` = this rank's block of ``send_tensor`` of rank ``src``, which holds one for each rank.

    On every rank ``send_tensor`` is as many times larger as there are ranks.
    """
    communicator_of(comm).scatter(send_tensor, recv_tensor, src)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Comm = None) -> None:
    """On rank ``src``, ``tensor`` has a block of ``count`` elements for each rank and stays as it is.

    On other ranks it has ``count`` elements and gets this rank's block.
    """
    communicator_of(comm).scatter_inplace(tensor, count, src)


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """``recv_tensor`` = this rank's block of the reduction of all ranks' ``send_tensor``, which holds one for each
    rank."""
    communicator_of(comm).reduce_scatter(send_tensor, recv_tensor, op)


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """Block number ``rank`` of ``tensor`` = that block of the reduction of all ranks' ``tensor``; the rest stays as
    it is."""
    communicator_of(comm).reduce_scatter_inplace(tensor, op)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Block j of rank i's ``send_tensor`` becomes block i of rank j's ``recv_tensor``; one block for each rank, equal
    sizes."""
    communicator_of(comm).alltoall(send_tensor, recv_tensor)


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """``alltoall`` whose result replaces its input."""
    communicator_of(comm).alltoall_inplace(tensor)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """``alltoall`` with blocks of any size: rank j gets ``send_counts[j]`` elements of ``send_tensor`` from element
    ``send_displs[j]`` on, and elements from rank i go to the ``recv_counts[i]`` elements of ``recv_tensor`` from
    ``recv_displs[i]`` on. The rest of ``recv_tensor`` stays as it is.

    Lists of whole numbers, one for each rank; further entries are ignored. ``recv_counts[i]`` here must be
    ``send_counts`` of this rank at rank i, else CommunicationError comes on all ranks. Blocks to be received must not
    overlap (ValueError); those sent may.
    """
    communicator_of(comm).alltoall_v(send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs)


def alltoall_v_inplace(tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None) -> None:
    """``alltoall_v`` whose result replaces its input: block j goes to rank j, and is replaced by the block
    that rank j sends."""
    communicator_of(comm).alltoall_v_inplace(tensor, counts, displs)


def statistics() -> Statistics:
    """Times and bytes of all communication so far; see ``Statistics``."""
    session = current()
    devices(session).settle()
    return session.statistics.summary(session.connection.counters())
