"""Collective and point-to-point operations on tensors, in the signatures of the original.

All are synchronous: when they return, the result is there. ``comm`` is a communicator, or None for all ranks; roots and
peers are positions in it. Tensors lie on the CPU and may have any shape and be non-contiguous. A tensor made by
``empty`` lies in memory that the daemon sees: nothing is copied on its way.

Sizes are checked before anything is sent (ValueError), and so are types (TypeError). CommunicationError tells of ranks
that called different things, of a lost rank or host, and of a stopped job; the tensor that gets the result may then
hold parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bagua.algorithms.codec import Codec
from bagua.torch_api.process_group import BaguaProcessGroup, _get_default_group, from_torch_group, new_group
from bagua.torch_api.session import CURRENT, Communicator, Session, current
from bagua.torch_api.start import destroy_process_group, init_process_group
from bagua.torch_api.statistics import Statistics
from bagua.torch_api.transfer import ReduceOp, check_reduction, check_tensor, transfer

__all__ = [
    "BaguaProcessGroup",
    "Communicator",
    "ReduceOp",
    "Statistics",
    "_get_default_group",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "empty",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "report",
    "scatter",
    "scatter_inplace",
    "send",
    "statistics",
]


def is_initialized() -> bool:
    """True between ``init_process_group`` and ``destroy_process_group``."""
    return CURRENT.session is not None


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor of zeros in memory that the daemon sees: primitives on it, or on contiguous parts of it,
    copy nothing.

    Like ``torch.empty``: ``empty(2, 3)`` or ``empty((2, 3))``, dtype float32 by default (``torch.get_default_dtype``).
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    return current().memory.empty(shape.numel(), dtype or torch.get_default_dtype()).view(shape)


def report(step: int = 0, total: int = 0, metrics: Mapping[str, float] | None = None, message: str = "") -> None:
    """Tells the daemon how far the training is: ``bagua run`` and ``bagua job show`` display it.

    Returns at once; when reports come faster than four a second, only the newest goes out. Never
    fails the training: without a daemon, or in a forked child, nothing happens.
    """
    session = CURRENT.session
    if session is not None and session.progress is not None:
        session.progress.report(step, total, metrics or {}, message)


def statistics() -> Statistics:
    """What was communicated so far; see ``Statistics``."""
    session = current()
    return session.statistics.summary(session.connection.counters())


def _begin(comm: Communicator | None) -> tuple[Session, Communicator]:
    session = current()
    if comm is None:
        return session, session.world
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm is a {type(comm).__name__}: pass a communicator, or None for all ranks.")
    return session, comm


def _check_root(root: int, group: Communicator, name: str) -> int:
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < group.nranks():
        raise ValueError(f"{name} is {root!r}: it must be a rank from 0 to {group.nranks() - 1}.")
    return root


def _pair(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, send_rows: int = 1, recv_rows: int = 1) -> int:
    """Elements per rank of tensors of ``send_rows`` and ``recv_rows`` times that many. Raises TypeError, ValueError."""
    check_tensor(send_tensor, "send_tensor")
    if recv_tensor is send_tensor and send_rows == recv_rows == 1:
        return send_tensor.numel()
    check_tensor(recv_tensor, "recv_tensor")
    if send_tensor.dtype != recv_tensor.dtype:
        raise TypeError(f"send_tensor is {send_tensor.dtype} and recv_tensor is {recv_tensor.dtype}: they must agree.")
    if send_tensor.numel() * recv_rows != recv_tensor.numel() * send_rows:
        ratio = "have equal sizes" if send_rows == recv_rows else f"be as {send_rows} to {recv_rows}"
        raise ValueError(
            f"send_tensor has {send_tensor.numel()} elements {list(send_tensor.shape)} and recv_tensor "
            f"{recv_tensor.numel()} {list(recv_tensor.shape)}: they must {ratio}."
        )
    if send_tensor.numel() % send_rows:
        raise ValueError(
            f"send_tensor has {send_tensor.numel()} elements {list(send_tensor.shape)}, which {send_rows} ranks can't "
            "share equally."
        )
    return send_tensor.numel() // send_rows


def _check_codec(codec: Codec | str, dtype: torch.dtype, op: ReduceOp) -> Codec | None:
    """``codec`` as a Codec, None for none. Raises TypeError or ValueError where nothing can be encoded so."""
    found = Codec.of(codec)
    if found is None:
        return None
    if dtype is not torch.float32:
        raise TypeError(f"{dtype} tensors can't be encoded: a codec takes torch.float32. Pass codec=None.")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"op is {op.name}: with a codec it must be SUM or AVG.")
    return found


def _share(tensor: torch.Tensor, group: Communicator) -> int:
    """Elements per rank of a tensor that is cut in equal blocks, one for each rank."""
    count, left = divmod(check_tensor(tensor, "tensor").numel(), group.nranks())
    if left:
        raise ValueError(
            f"tensor has {tensor.numel()} elements {list(tensor.shape)}, which {group.nranks()} ranks "
            "can't share equally."
        )
    return count


def _check_count(tensor: torch.Tensor, count: int, blocks: int) -> None:
    if check_tensor(tensor, "tensor").numel() != count * blocks:
        raise ValueError(
            f"tensor has {tensor.numel()} elements {list(tensor.shape)}; with count={count} this rank must pass "
            f"{count * blocks}."
        )


class _Blocks:
    """A tensor seen as equal blocks, one for each rank, also if it is not contiguous: then ``close`` copies back."""

    def __init__(self, tensor: torch.Tensor, count: int) -> None:
        self.tensor = tensor
        self.count = count
        self.flat = tensor.detach().contiguous().view(-1)

    def block(self, index: int) -> torch.Tensor:
        return self.flat[index * self.count : (index + 1) * self.count]

    def close(self) -> None:
        if not self.tensor.is_contiguous():
            with torch.no_grad():
                self.tensor.copy_(self.flat.view(self.tensor.shape))


def barrier(comm: Communicator | None = None) -> None:
    """Returns when every rank has called it."""
    session, group = _begin(comm)
    session.connection.barrier(group.id)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Communicator | None = None) -> None:
    """``tensor`` of rank ``src`` replaces that of every rank. Same size and dtype everywhere."""
    session, group = _begin(comm)
    _check_root(src, group, "src")
    check_tensor(tensor, "tensor")
    at_root = group.rank() == src
    give, take = (tensor, None) if at_root else (None, tensor)
    transfer(session, "broadcast", give, take, tensor.numel(), group, root=src, together=at_root)


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | None = None,
    *,
    codec: Codec | str | None = None,
) -> None:
    """``recv_tensor`` = reduction of all ranks' ``send_tensor``, the same bits on every rank. Equal sizes.

    ``codec``: how float32 that is summed or averaged crosses between hosts, without error feedback; see
    ``bagua.algorithms.codec.Codec``. Inside a host nothing is encoded.
    """
    session, group = _begin(comm)
    count = _pair(send_tensor, recv_tensor)
    op = check_reduction(send_tensor.dtype, op)
    encoding = None if codec is None else _check_codec(codec, send_tensor.dtype, op)
    transfer(session, "allreduce", send_tensor, recv_tensor, count, group, op=op, together=True, codec=encoding)


def allreduce_inplace(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | None = None,
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
    comm: Communicator | None = None,
) -> None:
    """``recv_tensor`` of rank ``dst`` = reduction of all ranks' ``send_tensor``; other ranks' stays as it is. Equal
    sizes."""
    session, group = _begin(comm)
    _check_root(dst, group, "dst")
    count = _pair(send_tensor, recv_tensor)
    op = check_reduction(send_tensor.dtype, op)
    at_root = group.rank() == dst
    result = recv_tensor if at_root else None
    transfer(session, "reduce", send_tensor, result, count, group, op=op, root=dst, together=at_root)


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Communicator | None = None
) -> None:
    """``tensor`` of rank ``dst`` = reduction of all ranks' ``tensor``."""
    reduce(tensor, tensor, dst, op, comm)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Communicator | None = None) -> None:
    """``recv_tensor`` = all ranks' ``send_tensor``, one after the other; it is as many times larger as there are
    ranks."""
    session, group = _begin(comm)
    n = group.nranks()
    count = _pair(send_tensor, recv_tensor, 1, n)
    transfer(session, "allgather", send_tensor, recv_tensor, count, group, recv_rows=n)


def allgather_inplace(tensor: torch.Tensor, comm: Communicator | None = None) -> None:
    """Every rank's own block of ``tensor`` goes to all ranks. Block number ``rank`` of equal blocks, one for each
    rank."""
    _, group = _begin(comm)
    count = _share(tensor, group)
    whole = _Blocks(tensor, count)
    allgather(whole.block(group.rank()), whole.flat, group)
    whole.close()


def gather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Communicator | None = None) -> None:
    """``recv_tensor`` of rank ``dst`` = all ranks' ``send_tensor``, one after the other; other ranks' stays as it is.

    On every rank it is as many times larger as there are ranks.
    """
    session, group = _begin(comm)
    _check_root(dst, group, "dst")
    n = group.nranks()
    count = _pair(send_tensor, recv_tensor, 1, n)
    result = recv_tensor if group.rank() == dst else None
    transfer(session, "gather", send_tensor, result, count, group, recv_rows=n, root=dst)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Communicator | None = None) -> None:
    """On rank ``dst``, ``tensor`` has a block of ``count`` elements for each rank, gives its own and gets the others'.

    On other ranks it has ``count`` elements, which go to ``dst``.
    """
    session, group = _begin(comm)
    _check_root(dst, group, "dst")
    at_root = group.rank() == dst
    n = group.nranks()
    _check_count(tensor, count, n if at_root else 1)
    whole = _Blocks(tensor, count)
    own, result = (whole.block(group.rank()), whole.flat) if at_root else (whole.flat, None)
    transfer(session, "gather", own, result, count, group, recv_rows=n, root=dst)
    if at_root:
        whole.close()


def scatter(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Communicator | None = None) -> None:
    """``recv_tensor`` = this rank's block of ``send_tensor`` of rank ``src``, which holds one for each rank.

    On every rank ``send_tensor`` is as many times larger as there are ranks.
    """
    session, group = _begin(comm)
    _check_root(src, group, "src")
    n = group.nranks()
    count = _pair(send_tensor, recv_tensor, n, 1)
    blocks = send_tensor if group.rank() == src else None
    transfer(session, "scatter", blocks, recv_tensor, count, group, send_rows=n, root=src)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Communicator | None = None) -> None:
    """On rank ``src``, ``tensor`` has a block of ``count`` elements for each rank and stays as it is.

    On other ranks it has ``count`` elements and gets this rank's block.
    """
    session, group = _begin(comm)
    _check_root(src, group, "src")
    at_root = group.rank() == src
    n = group.nranks()
    _check_count(tensor, count, n if at_root else 1)
    whole = _Blocks(tensor, count)
    blocks, own = (whole.flat, whole.block(group.rank())) if at_root else (None, whole.flat)
    transfer(session, "scatter", blocks, own, count, group, send_rows=n, root=src)
    if not at_root:
        whole.close()


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | None = None,
) -> None:
    """``recv_tensor`` = this rank's block of the reduction of all ranks' ``send_tensor``, which holds one for each
    rank."""
    session, group = _begin(comm)
    n = group.nranks()
    count = _pair(send_tensor, recv_tensor, n, 1)
    op = check_reduction(send_tensor.dtype, op)
    transfer(session, "reduce_scatter", send_tensor, recv_tensor, count, group, send_rows=n, op=op)


def reduce_scatter_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Communicator | None = None) -> None:
    """Block number ``rank`` of ``tensor`` = that block of the reduction of all ranks' ``tensor``; the rest stays as
    it is."""
    _, group = _begin(comm)
    count = _share(tensor, group)
    whole = _Blocks(tensor, count)
    reduce_scatter(whole.flat, whole.block(group.rank()), op, group)
    whole.close()


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Communicator | None = None) -> None:
    """Block j of rank i's ``send_tensor`` becomes block i of rank j's ``recv_tensor``; one block for each rank, equal
    sizes."""
    session, group = _begin(comm)
    n = group.nranks()
    count = _pair(send_tensor, recv_tensor, n, n)
    transfer(session, "alltoall", send_tensor, recv_tensor, count, group, send_rows=n, recv_rows=n)


def alltoall_inplace(tensor: torch.Tensor, comm: Communicator | None = None) -> None:
    """``alltoall`` whose result replaces its input."""
    _, group = _begin(comm)
    _share(tensor, group)
    alltoall(tensor.detach().clone(), tensor, group)


def send(tensor: torch.Tensor, dst: int, comm: Communicator | None = None) -> None:
    """Sends ``tensor`` to rank ``dst``, which must receive one of the same size and dtype. Returns when it has
    arrived."""
    session, group = _begin(comm)
    _check_peer(dst, group, "dst")
    check_tensor(tensor, "tensor")
    transfer(session, "send", tensor, None, tensor.numel(), group, root=dst)


def recv(tensor: torch.Tensor, src: int, comm: Communicator | None = None) -> None:
    """Receives into ``tensor`` what rank ``src`` sends."""
    session, group = _begin(comm)
    _check_peer(src, group, "src")
    check_tensor(tensor, "tensor")
    transfer(session, "recv", None, tensor, tensor.numel(), group, root=src)


def _check_peer(peer: int, group: Communicator, name: str) -> None:
    if _check_root(peer, group, name) == group.rank():
        raise ValueError(f"{name} is {peer}, this rank itself: name another rank.")
