"""All-reduce of sparse tensors, which DDP needs for sparse gradients: all ranks gather the entries of all, and add them
up."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from bagua.torch_api.comm.communicator import Communicator


def check_sparse(tensor: torch.Tensor, op: Any) -> None:
    """Raises ValueError unless the tensor can be summed by ``add_up``."""
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu:
        raise ValueError(
            f"all_reduce: the tensor is {tensor.layout} on {tensor.device}. Pass tensor.to_dense(). [BG401]"
        )
    if getattr(op, "op", op) != distributed.ReduceOp.SUM:
        raise ValueError(f"all_reduce: sparse tensors can be reduced with SUM alone, not with {op}. [BG405]")


def add_up(everyone: Communicator, tensor: torch.Tensor) -> None:
    """``tensor`` becomes the sum of all ranks', which have its shape and sparse dimensions."""
    own = tensor.detach().coalesce()
    counts = torch.empty(everyone.nranks(), dtype=torch.int64)
    everyone.allgather(torch.tensor([own._nnz()]), counts)
    most = int(counts.max())
    places = _gathered(everyone, own.indices().t(), most)
    values = _gathered(everyone, own.values(), most)
    used = torch.cat([torch.arange(count) + rank * most for rank, count in enumerate(counts.tolist())])
    total = torch.sparse_coo_tensor(places[used].t(), values[used], own.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())  # not what detach() gives: that would take the entries to itself


def _gathered(everyone: Communicator, rows: torch.Tensor, most: int) -> torch.Tensor:
    """Rows of all ranks, as if each had ``most``."""
    mine = rows.new_zeros((most, *rows.shape[1:]))
    mine[: len(rows)] = rows
    whole = rows.new_empty((everyone.nranks() * most, *rows.shape[1:]))
    everyone.allgather(mine, whole)
    return whole
