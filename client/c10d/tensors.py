"""Tensors of any dtype and layout, as operations of ours take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.transfer import DTYPES, ReduceOp

REDUCTIONS = {
    distributed.ReduceOp.SUM: ReduceOp.SUM,
    distributed.ReduceOp.AVG: ReduceOp.AVG,
    distributed.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    distributed.ReduceOp.MIN: ReduceOp.MIN,
    distributed.ReduceOp.MAX: ReduceOp.MAX,
    distributed.ReduceOp.BAND: ReduceOp.BAND,
    distributed.ReduceOp.BOR: ReduceOp.BOR,
    distributed.ReduceOp.BXOR: ReduceOp.BXOR,
}
OF_BOOLS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


def reduction(tensor: torch.Tensor, op: Any) -> ReduceOp:
    """torch's ``op`` as ours. Sums of bools are "or", products "and". Raises ValueError for one that we don't have."""
    found = REDUCTIONS.get(getattr(op, "op", op))
    if found is None:
        raise ValueError(f"Backend bagua has no reduction {op}: choose one of {', '.join(map(str, REDUCTIONS))}.")
    return OF_BOOLS.get(found, found) if tensor.dtype is torch.bool else found


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that travels: complex numbers as pairs, what we have no name for as bytes."""
    if tensor.dtype in DTYPES:
        return tensor
    if tensor.is_complex():
        return carried(torch.view_as_real(tensor))
    return tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


@contextmanager
def flat(tensor: torch.Tensor, changes: bool = False) -> Iterator[torch.Tensor]:
    """The elements in a row, without history; complex numbers as pairs. ``changes``: what becomes of them is written
    back where that is a copy."""
    plain = tensor.detach()
    one = plain.contiguous()
    if one.is_conj() or one.is_neg():
        one = one.resolve_conj().resolve_neg()
    yield torch.view_as_real(one) if one.is_complex() else one
    if changes and one is not plain and one.data_ptr() != plain.data_ptr():
        plain.copy_(one)


@contextmanager
def blocks(parts: Sequence[torch.Tensor], like: torch.Tensor, changes: bool = False) -> Iterator[torch.Tensor]:
    """``parts``, which may be one tensor that holds all blocks, in a row. ``changes``: they are written back."""
    plain = [part.detach() for part in parts]
    if len(plain) == 1:
        with flat(plain[0], changes) as one:
            yield one.view(-1)
        return
    made = torch.cat([part.reshape(-1) for part in plain]) if plain else like.new_empty(0)
    yield torch.view_as_real(made).view(-1) if made.is_complex() else made
    if changes:
        for part, result in zip(plain, torch.split(made, [part.numel() for part in plain]), strict=True):
            part.copy_(result.view(part.shape))


def same_numel(parts: Sequence[torch.Tensor], numel: int, ranks: int, name: str) -> None:
    """Raises ValueError unless there is one part of ``numel`` elements for each rank."""
    if len(parts) != ranks:
        raise ValueError(f"{name}: the list has {len(parts)} tensors, the group {ranks} ranks.")
    sizes = sorted({part.numel() for part in parts})
    if sizes not in ([], [numel]):
        raise ValueError(f"{name}: tensors have {sizes} elements: they must be as large as this rank's, {numel}.")


def added(everyone: Communicator, tensor: torch.Tensor, op: Any) -> None:
    """A sparse tensor becomes the sum of all ranks', which have the same shape and sparse dimensions."""
    if getattr(op, "op", op) != distributed.ReduceOp.SUM:
        raise ValueError(f"Backend bagua reduces sparse tensors by SUM alone, not by {op}: pass tensor.to_dense().")
    mine = tensor.detach().coalesce()
    most = torch.tensor([mine._nnz()])
    counts = torch.empty(everyone.nranks(), dtype=torch.int64)
    everyone.allgather(most, counts)
    room = int(counts.max())
    places, values = mine.indices(), mine.values()
    all_places = _gathered(everyone, _padded(places.t(), room))
    all_values = _gathered(everyone, _padded(values, room))
    kept = torch.cat([torch.arange(count) + row * room for row, count in enumerate(counts.tolist())])
    summed = torch.sparse_coo_tensor(all_places[kept].t(), all_values[kept], tensor.shape).coalesce()
    tensor.detach().sparse_resize_(summed.shape, summed.sparse_dim(), summed.dense_dim()).copy_(summed)


def _padded(rows: torch.Tensor, room: int) -> torch.Tensor:
    padded = rows.new_zeros((room, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded


def _gathered(everyone: Communicator, rows: torch.Tensor) -> torch.Tensor:
    whole = rows.new_empty((everyone.nranks() * len(rows), *rows.shape[1:]))
    everyone.allgather(rows, whole)
    return whole
