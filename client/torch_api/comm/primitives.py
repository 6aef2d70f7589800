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

import torch

from bagua.algorithms.codec import Codec
from bagua.torch_api.comm.checks import Blocks, begin, check_codec, check_count, check_root, pair, share
from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, Comm
from bagua.torch_api.comm.transfer import ReduceOp, check_reduction, check_tensor, transfer
from bagua.torch_api.join.session import current
from bagua.torch_api.join.statistics import Statistics


def statistics() -> Statistics:
    """What was communicated so far; see ``Statistics``."""
    session = current()
    for device in session.devices.values():
        device.steps.settle(wait=True)
    return session.statistics.summary(session.connection.counters())


def barrier(comm: Comm = None) -> None:
    """Returns when every rank has called it."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    session.connection.barrier(group.id)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None) -> None:
    """``tensor`` of rank ``src`` replaces that of every rank. Same size and dtype everywhere."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_root(src, group, "src")
    check_tensor(tensor, "tensor")
    at_root = group.rank() == src
    give, take = (tensor, None) if at_root else (None, tensor)
    transfer(session, "broadcast", give, take, tensor.numel(), group, root=src, together=at_root)


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
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    count = pair(send_tensor, recv_tensor)
    op = check_reduction(send_tensor.dtype, op)
    encoding = None if codec is None else check_codec(codec, send_tensor.dtype, op)
    transfer(session, "allreduce", send_tensor, recv_tensor, count, group, op=op, together=True, codec=encoding)


def allreduce_inplace(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
    *,
    codec: Codec | str | None = None,
) -> None:
    """``tensor`` = reduction of all ranks' ``tensor``. ``codec``: see ``allreduce``."""
    allreduce(tensor, tensor, op, comm, codec=codec)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """``recv_tensor`` of rank ``dst`` = reduction of all ranks' ``send_tensor``; other ranks' stays as it is. Equal
    sizes."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_root(dst, group, "dst")
    count = pair(send_tensor, recv_tensor)
    op = check_reduction(send_tensor.dtype, op)
    at_root = group.rank() == dst
    result = recv_tensor if at_root else None
    transfer(session, "reduce", send_tensor, result, count, group, op=op, root=dst, together=at_root)


def reduce_inplace(tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """``tensor`` of rank ``dst`` = reduction of all ranks' ``tensor``."""
    reduce(tensor, tensor, dst, op, comm)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """``recv_tensor`` = all ranks' ``send_tensor``, one after the other; it is as many times larger as there are
    ranks."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    n = group.nranks()
    count = pair(send_tensor, recv_tensor, 1, n)
    transfer(session, "allgather", send_tensor, recv_tensor, count, group, recv_rows=n)


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """Every rank's own block of ``tensor`` goes to all ranks. Block number ``rank`` of equal blocks, one for each
    rank."""
    if comm is NON_COMM_MEMBER:
        return
    _, group = begin(comm)
    count = share(tensor, group)
    whole = Blocks(tensor, count)
    allgather(whole.block(group.rank()), whole.flat, group)
    whole.close()


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """``recv_tensor`` of rank ``dst`` = all ranks' ``send_tensor``, one after the other; other ranks' stays as it is.

    On every rank it is as many times larger as there are ranks.
    """
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_root(dst, group, "dst")
    n = group.nranks()
    count = pair(send_tensor, recv_tensor, 1, n)
    result = recv_tensor if group.rank() == dst else None
    transfer(session, "gather", send_tensor, result, count, group, recv_rows=n, root=dst)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """On rank ``dst``, ``tensor`` has a block of ``count`` elements for each rank, gives its own and gets the others'.

    On other ranks it has ``count`` elements, which go to ``dst``.
    """
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_root(dst, group, "dst")
    at_root = group.rank() == dst
    n = group.nranks()
    check_count(tensor, count, n if at_root else 1)
    whole = Blocks(tensor, count)
    own, result = (whole.block(group.rank()), whole.flat) if at_root else (whole.flat, None)
    transfer(session, "gather", own, result, count, group, recv_rows=n, root=dst)
    if at_root:
        whole.close()


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """``recv_tensor`` = this rank's block of ``send_tensor`` of rank ``src``, which holds one for each rank.

    On every rank ``send_tensor`` is as many times larger as there are ranks.
    """
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_root(src, group, "src")
    n = group.nranks()
    count = pair(send_tensor, recv_tensor, n, 1)
    blocks = send_tensor if group.rank() == src else None
    transfer(session, "scatter", blocks, recv_tensor, count, group, send_rows=n, root=src)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Comm = None) -> None:
    """On rank ``src``, ``tensor`` has a block of ``count`` elements for each rank and stays as it is.

    On other ranks it has ``count`` elements and gets this rank's block.
    """
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    check_root(src, group, "src")
    at_root = group.rank() == src
    n = group.nranks()
    check_count(tensor, count, n if at_root else 1)
    whole = Blocks(tensor, count)
    blocks, own = (whole.flat, whole.block(group.rank())) if at_root else (None, whole.flat)
    transfer(session, "scatter", blocks, own, count, group, send_rows=n, root=src)
    if not at_root:
        whole.close()


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """``recv_tensor`` = this rank's block of the reduction of all ranks' ``send_tensor``, which holds one for each
    rank."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    n = group.nranks()
    count = pair(send_tensor, recv_tensor, n, 1)
    op = check_reduction(send_tensor.dtype, op)
    transfer(session, "reduce_scatter", send_tensor, recv_tensor, count, group, send_rows=n, op=op)


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """Block number ``rank`` of ``tensor`` = that block of the reduction of all ranks' ``tensor``; the rest stays as
    it is."""
    if comm is NON_COMM_MEMBER:
        return
    _, group = begin(comm)
    count = share(tensor, group)
    whole = Blocks(tensor, count)
    reduce_scatter(whole.flat, whole.block(group.rank()), op, group)
    whole.close()


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Block j of rank i's ``send_tensor`` becomes block i of rank j's ``recv_tensor``; one block for each rank, equal
    sizes."""
    if comm is NON_COMM_MEMBER:
        return
    session, group = begin(comm)
    n = group.nranks()
    count = pair(send_tensor, recv_tensor, n, n)
    transfer(session, "alltoall", send_tensor, recv_tensor, count, group, send_rows=n, recv_rows=n)


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """``alltoall`` whose result replaces its input."""
    if comm is NON_COMM_MEMBER:
        return
    _, group = begin(comm)
    share(tensor, group)
    alltoall(tensor.detach().clone(), tensor, group)
