"""Collectives that autograd can go through."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, Comm, Communicator, World
from bagua.torch_api.comm.groups import BaguaProcessGroup, from_torch_group
from bagua.torch_api.comm.primitives import allreduce_inplace
from bagua.torch_api.comm.transfer import ReduceOp

DIFFERENTIABLE = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX)


def all_reduce(tensor: torch.Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None) -> torch.Tensor:
    """A new tensor: the reduction of all ranks' ``tensor``, which gradients flow through.

    ``op``: SUM, AVG, MIN or MAX, of ``torch.distributed`` or of ``bagua.torch_api``. ``group``: None for all ranks, a
    process group of either, or a communicator. A process that is no member gets ``tensor`` back. All members call it,
    and all run backward through it.

    The loss of the job counts as the sum of the ranks' losses. Gradient of SUM: the sum of all ranks' gradients, of
    AVG: their mean. Of MIN and MAX: their sum goes to the ranks whose element was chosen, in equal parts where there
    are several. (The original gives MAX's gradient to all ranks.) Raises ValueError for another ``op``.
    """
    comm = _communicator(group)
    if comm is NON_COMM_MEMBER:
        return tensor
    made: torch.Tensor = _AllReduce.apply(tensor, _reduction(op), comm)  # type: ignore[no-untyped-call]
    return made


def _reduction(op: Any) -> ReduceOp:
    if isinstance(op, ReduceOp):
        found = op
    else:
        name = str(getattr(op, "op", op)).rpartition(".")[2]
        found = ReduceOp.__members__.get(name, ReduceOp.BOR)
    if found not in DIFFERENTIABLE:
        raise ValueError(f"{op} has no gradient: choose one of {', '.join(one.name for one in DIFFERENTIABLE)}.")
    return found


def _communicator(group: Any) -> Comm:
    if group is None or isinstance(group, Communicator | World):
        return group
    if isinstance(group, BaguaProcessGroup):
        return group.get_global_communicator()
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        return NON_COMM_MEMBER
    return from_torch_group(group).get_global_communicator()


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, op: ReduceOp, comm: Comm) -> torch.Tensor:
        context.op, context.comm = op, comm
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        allreduce_inplace(result, op, comm)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            context.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        op, comm = context.op, context.comm
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            return all_reduce(gradient, op, comm), None, None
        tensor, result = context.saved_tensors
        chosen = (tensor == result).to(gradient.dtype)
        share = chosen / all_reduce(chosen, ReduceOp.SUM, comm)
        return all_reduce(gradient, ReduceOp.SUM, comm) * share, None, None
