"""Collectives that gradients flow through.

The loss of the job counts as the sum of the ranks' losses. All members call a collective, and all run backward through
it, in the same order. ``group``: None for all ranks, a process group of ``torch.distributed`` or of
``bagua.torch_api``, or a communicator. A process that is no member gets ``tensor`` back.

In an elastic job ``all_reduce`` is repeated when a rank is lost. The others raise MembershipChanged, forward and
backward: the size of what they return depends on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from bagua.base.errors import MembershipChanged
from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, Communicator
from bagua.torch_api.comm.groups import communicator_of_group
from bagua.torch_api.comm.transfer import ReduceOp

DIFFERENTIABLE = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX)
LINEAR = (ReduceOp.SUM, ReduceOp.AVG)


def all_reduce(tensor: torch.Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None) -> torch.Tensor:
    """A new tensor: the reduction of all ranks' ``tensor``, which have equal shapes.

    ``op``: SUM, AVG, MIN or MAX, of ``torch.distributed`` or of ``bagua.torch_api``. Gradient of SUM: the sum of all
    ranks' gradients, of AVG: their mean. Of MIN and MAX: their sum goes to the ranks whose element was chosen, in equal
    parts where there are several. (The original gives MAX's gradient to all ranks.) Raises ValueError for another
    ``op``.
    """
    op, comm = _reduction(op, DIFFERENTIABLE), communicator_of_group(group)
    return tensor if comm is NON_COMM_MEMBER else _apply(_AllReduce, tensor, op, comm)


def all_gather(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """A new tensor: all ranks' ``tensor``, one after the other along the first dimension.

    Equal shapes on all ranks. [m, ...] becomes [ranks * m, ...]; a number counts as [1]. Gradient: each rank gets the
    sum of all ranks' gradients of its block.
    """
    comm = communicator_of_group(group)
    return tensor if comm is NON_COMM_MEMBER else _apply(_AllGather, _with_rows(tensor), comm)


def reduce_scatter(tensor: torch.Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None) -> torch.Tensor:
    """A new tensor: this rank's block of the reduction of all ranks' ``tensor``, which have equal shapes.

    [ranks * m, ...] becomes [m, ...]. ``op``: SUM or AVG. Gradient: all ranks' gradients, one after the other. Raises
    ValueError for another ``op``, and where the first dimension can't be shared equally.
    """
    op, comm = _reduction(op, LINEAR), communicator_of_group(group)
    if comm is NON_COMM_MEMBER:
        return tensor
    _check_share(tensor, comm)
    return _apply(_ReduceScatter, tensor, op, comm)


def all_to_all(
    tensor: torch.Tensor,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    group: Any = None,
) -> torch.Tensor:
    """A new tensor: the blocks that all ranks have for this one, one after the other along the first dimension.

    ``send_counts[j]`` rows of ``tensor`` go to rank j, first those for rank 0. ``recv_counts[i]`` rows come from rank
    i; None: the ranks tell each other, in one more small exchange. Without ``send_counts`` all blocks are equal: then
    [ranks * m, ...] stays [ranks * m, ...]. Gradient: it goes the way back. Raises ValueError for counts that do not
    fit ``tensor``.
    """
    comm = communicator_of_group(group)
    if comm is NON_COMM_MEMBER:
        return tensor
    if send_counts is None:
        if recv_counts is not None:
            raise ValueError("recv_counts without send_counts: pass both, or neither for equal blocks. [BG403]")
        _check_share(tensor, comm)
        return _apply(_AllToAll, tensor, comm)
    gives, tensor = _counts(send_counts, "send_counts", comm), _with_rows(tensor)
    if sum(gives) != len(tensor):
        raise ValueError(f"send_counts add up to {sum(gives)} rows: tensor has {len(tensor)}. [BG403]")
    takes = _swap_counts(gives, comm) if recv_counts is None else _counts(recv_counts, "recv_counts", comm)
    return _apply(_AllToAllV, tensor, gives, takes, comm)


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    made: torch.Tensor = function.apply(*arguments)
    return made


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _check_share(tensor: torch.Tensor, comm: Communicator) -> None:
    n = comm.nranks()
    if tensor.dim() == 0 or len(tensor) % n:
        raise ValueError(
            f"tensor has shape {list(tensor.shape)}: {n} ranks can't share its first dimension equally. Pad it to a "
            f"multiple of {n}. [BG403]"
        )


def _counts(counts: Sequence[int], name: str, comm: Communicator) -> tuple[int, ...]:
    found = tuple(counts)
    if len(found) != comm.nranks() or any(not isinstance(one, int) or one < 0 for one in found):
        raise ValueError(
            f"{name} is {list(counts)}: it must be {comm.nranks()} whole numbers, one for each rank. [BG403]"
        )
    return found


def _swap_counts(gives: tuple[int, ...], comm: Communicator) -> tuple[int, ...]:
    sent, found = torch.tensor(gives, device="cpu"), torch.empty(len(gives), dtype=torch.int64, device="cpu")
    comm.alltoall(sent, found)
    return tuple(found.tolist())


def torch_reduce_op_to_bagua(op: Any) -> ReduceOp:
    """The operation of the same name. Raises ValueError for an operation of torch's that Bagua lacks."""
    return _reduction(op, tuple(ReduceOp))


def _reduction(op: Any, allowed: Sequence[ReduceOp]) -> ReduceOp:
    if isinstance(op, ReduceOp):
        found = op
    else:
        # An operation of torch holds a RedOpType, which prints as RedOpType.SUM.
        name = str(getattr(op, "op", op)).rpartition(".")[2]
        found = ReduceOp.__members__.get(name, ReduceOp.BOR)  # BOR is in no list: an unknown name is refused like it
    if found not in allowed:
        raise ValueError(f"{op} has no gradient here: choose one of {', '.join(one.name for one in allowed)}. [BG405]")
    return found


def _remember(context: Any, comm: Communicator) -> None:
    """Keeps the communicator for ``_recall``, in backward."""
    context.comm, context.members = comm, comm.numbers  # members keep their numbers, and not their ranks


def _recall(context: Any) -> Communicator:
    """The communicator of forward. Raises MembershipChanged if its members are others now."""
    comm: Communicator = context.comm
    if comm.numbers != context.members:
        raise MembershipChanged(
            "The ranks of the job have changed since forward, and with them the blocks of its result: gradients can't "
            "go back. Leave this step out on all ranks. all_reduce is repeated instead. [BG508]"
        )
    return comm


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, op: ReduceOp, comm: Communicator) -> torch.Tensor:
        context.op, context.comm = op, comm
        # A clone: the input is the program's, and autograd's.
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        comm.allreduce_inplace(result, op)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            context.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        op, comm = context.op, context.comm
        if op in LINEAR:
            return all_reduce(gradient, op, comm), None, None
        tensor, result = context.saved_tensors
        chosen = (tensor == result).to(gradient.dtype)
        # Several ranks may have the chosen value: they share the gradient.
        share = chosen / all_reduce(chosen, ReduceOp.SUM, comm)
        return all_reduce(gradient, ReduceOp.SUM, comm) * share, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
        _remember(context, comm)
        result = tensor.new_empty(comm.nranks() * len(tensor), *tensor.shape[1:])
        comm.allgather(tensor, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # By ``apply``: a gradient may be differentiated again.
        return _apply(_ReduceScatter, gradient, ReduceOp.SUM, _recall(context)), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, op: ReduceOp, comm: Communicator) -> torch.Tensor:
        context.op = op
        _remember(context, comm)
        result = tensor.new_empty(len(tensor) // comm.nranks(), *tensor.shape[1:])
        comm.reduce_scatter(tensor, result, op)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        comm = _recall(context)
        whole = _apply(_AllGather, gradient, comm)
        return (whole / comm.nranks() if context.op == ReduceOp.AVG else whole), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
        _remember(context, comm)
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        comm.alltoall(tensor, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply(_AllToAll, gradient, _recall(context)), None


class _AllToAllV(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, gives: tuple[int, ...], takes: tuple[int, ...], comm: Communicator
    ) -> torch.Tensor:
        context.counts = gives, takes
        _remember(context, comm)
        result = tensor.new_empty(sum(takes), *tensor.shape[1:])
        row = math.prod(tensor.shape[1:])
        comm.alltoall_v(tensor, *_places(gives, row), result, *_places(takes, row))
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gives, takes = context.counts
        return _apply(_AllToAllV, gradient, takes, gives, _recall(context)), None, None, None


def _places(counts: Sequence[int], row: int) -> tuple[list[int], list[int]]:
    """Elements of each block, and before it."""
    return [count * row for count in counts], [sum(counts[:rank]) * row for rank in range(len(counts))]
