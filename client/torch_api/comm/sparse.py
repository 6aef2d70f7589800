"""The sum of sparse tensors: all ranks gather the entries of all, and add them up."""

from __future__ import annotations

import torch

from bagua.torch_api.comm.communicator import Communicator


def sum_of_sparse(everyone: Communicator, own: torch.Tensor) -> torch.Tensor:
    """The coalesced sum of all ranks' tensors, which are coalesced and have one shape and number of sparse
    dimensions."""
    counts = torch.empty(everyone.nranks(), dtype=torch.int64, device="cpu")
    everyone.allgather(torch.tensor([own._nnz()], device="cpu"), counts)
    most = int(counts.max())
    places = _gathered(everyone, own.indices().t(), most)
    values = _gathered(everyone, own.values(), most)
    used = torch.cat(
        [torch.arange(count, device=own.device) + rank * most for rank, count in enumerate(counts.tolist())]
    )
    # Ranks' entries overlap: coalesce adds them up.
    total = torch.sparse_coo_tensor(places[used].t(), values[used], own.shape, check_invariants=False)
    return total.coalesce()


def _gathered(everyone: Communicator, rows: torch.Tensor, most: int) -> torch.Tensor:
    """Rows of all ranks, as if each had ``most``."""
    mine = rows.new_zeros((most, *rows.shape[1:]))
    mine[: len(rows)] = rows  # all-gather takes equally many from each rank
    whole = rows.new_empty((everyone.nranks() * most, *rows.shape[1:]))
    everyone.allgather(mine, whole)
    return whole
