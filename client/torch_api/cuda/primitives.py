"""Primitives on CUDA tensors: submitted in the order of the current stream, which then waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.cuda.connection import CudaConnection, CudaPlace
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.join.connection import AS_IT_IS, NOWHERE, Encoding, Place

if TYPE_CHECKING:
    from bagua.algorithms.codec import Codec


def carry_out(
    lane: CudaConnection,
    kind: str,
    dtype: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    count: int,
    comm: Communicator,
    *,
    op: int,
    root: int,
    together: bool,
    codec: Codec | None,
) -> None:
    """One operation on contiguous tensors of one device, at least one; see ``transfer``. The result is there for later
    work of the current stream."""
    if source is not None and target is not None and not together and _overlap(source, target):
        source = source.clone()
    given, taken = _place(source), _place(target)
    with PORT.cuda.by_way_of(comm.stream):
        ticket = lane.submit(
            lane.kinds[kind],
            comm=lane.twin(comm).id,
            dtype=dtype,
            count=count,
            op=op,
            root=root,
            src=given,
            dst=given if target is None and together else taken,
            shape=[] if source is None else source.shape,
            encoding=AS_IT_IS if codec is None else Encoding(lane.codecs[codec.name], codec.density_units),
        )
        lane.wait(ticket)


def _place(tensor: torch.Tensor | None) -> Place:
    return NOWHERE if tensor is None else CudaPlace(tensor)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, also = one.data_ptr(), other.data_ptr()
    return begin < also + other.numel() * other.element_size() and also < begin + one.numel() * one.element_size()
