"""Tensors of any dtype and layout, as operations of ours take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

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
    """torch's ``op`` as ours, for this tensor. Sums of bools are "or", products "and". Raises ValueError for one that
    we don't have, TypeError for a dtype that can't be reduced so."""
    found = REDUCTIONS.get(getattr(op, "op", op))
    if found is None:
        raise ValueError(
            f"Backend bagua has no reduction {op}: choose one of {', '.join(map(str, REDUCTIONS))}. [BG405]"
        )
    if tensor.is_complex() and found not in (ReduceOp.SUM, ReduceOp.AVG):
        raise TypeError(f"Complex tensors can't be reduced with {found.name}: use SUM or AVG. [BG405]")
    if tensor.dtype not in DTYPES and not tensor.is_complex():
        raise TypeError(
            f"{tensor.dtype} tensors can't be reduced. Those that can: {', '.join(DTYPES.values())}, complex. [BG405]"
        )
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
        _write(plain, one)


def _write(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copies, in whatever thread: a tensor that was made in inference mode may be written in that mode alone."""
    with torch.inference_mode(to.is_inference() or torch.is_inference_mode_enabled()), torch.no_grad():
        to.copy_(source)


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
            _write(part, result.view(part.shape))


def same_numel(parts: Sequence[torch.Tensor], numel: int, ranks: int, name: str) -> None:
    """Raises ValueError unless there is one part of ``numel`` elements for each rank."""
    if len(parts) != ranks:
        raise ValueError(f"{name}: the list has {len(parts)} tensors: pass one for each of the {ranks} ranks. [BG402]")
    sizes = sorted({part.numel() for part in parts})
    if sizes != [numel]:
        raise ValueError(
            f"{name}: all tensors must have the same number of elements. Those of the list have {sizes}, the other one "
            f"{numel}. [BG402]"
        )


def ratio(large: torch.Tensor, small: torch.Tensor, ranks: int, name: str) -> None:
    """Raises ValueError unless ``large`` has a block as large as ``small`` for each rank."""
    if large.numel() != ranks * small.numel():
        raise ValueError(
            f"{name}: the tensor of all ranks has {large.numel()} elements. It must have {ranks} times the "
            f"{small.numel()} of this rank's. [BG402]"
        )


def check(tensors: Sequence[torch.Tensor]) -> None:
    """Raises TypeError for tensors that can't travel, and for several that don't have one dtype."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise TypeError(f"A tensor is sparse ({tensor.layout}): pass tensor.to_dense(). [BG401]")
        if tensor.device.type not in ("cpu", "cuda"):
            raise TypeError(f"A tensor is on device {tensor.device}: pass one on the CPU or on a CUDA device. [BG401]")
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(
            f"Tensors have different dtypes: {', '.join(sorted(map(str, dtypes)))}. They must agree. [BG402]"
        )


def check_written(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError for tensors of which several elements are one place in memory."""
    for tensor in tensors:
        if tensor.numel() and any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                "Several elements of a tensor are one place in memory, as expand() makes them: pass tensor.clone(). "
                "[BG401]"
            )
