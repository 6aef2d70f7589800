"""All-reduce of sparse tensors, which DDP needs for sparse gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.sparse import sum_of_sparse


def check_sparse(tensor: torch.Tensor, op: Any) -> None:
    """Raises ValueError unless the tensor can be summed by ``add_up``."""
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
        raise ValueError(
            f"all_reduce: the tensor is {tensor.layout} on {tensor.device}. Pass tensor.to_dense(). [BG401]"
        )
    if getattr(op, "op", op) != distributed.ReduceOp.SUM:
        raise ValueError(f"all_reduce: sparse tensors can be reduced with SUM alone, not with {op}. [BG405]")


def add_up(everyone: Communicator, tensor: torch.Tensor) -> None:
    """Replaces ``tensor`` by the sum of all ranks', which have its shape and sparse dimensions."""
    total = sum_of_sparse(everyone, tensor.detach().coalesce())
    with torch.no_grad():
        tensor.copy_(total)  # not what detach() gives: that would take the entries to itself
