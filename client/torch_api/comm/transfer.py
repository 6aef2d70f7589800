"""Carries out one primitive: checks tensors, and hands their addresses to the core or to the GPU leg. The core copies
tensors in ordinary memory through a stage that the daemon sees (csrc/core/channel/transfer.h)."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Protocol

import torch
from torch.autograd.graph import increment_version

from bagua.algorithms.codec import Codec
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.shards import is_shard
from bagua.torch_api.cuda.connection import CudaPlace
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job.connection import AS_IT_IS, Encoding, Operation, request
from bagua.torch_api.job.session import Session

CONTIGUOUS = torch.contiguous_format

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.int8: "int8",
    torch.int16: "int16",
}


class ReduceOp(IntEnum):
    """Reductions. AVG divides by the number of ranks; integers truncate toward zero."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)


class TensorHolder(Protocol):
    """An object that stands for a tensor, as ``tensor.bagua_backend_tensor()`` does."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that travels."""
        ...


Carried = torch.Tensor | TensorHolder


def check_tensor(carried: Carried, name: str = "tensor") -> torch.Tensor:
    """The tensor that travels, if it can. Raises TypeError that names the reason and a remedy."""
    tensor = carried if isinstance(carried, torch.Tensor) else getattr(carried, "tensor", None)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(carried).__name__}: pass a torch.Tensor. [BG401]")
    # The usual case first: all other checks explain why it is not so.
    divided = type(tensor) is not torch.Tensor and is_shard(tensor)
    if tensor.dtype in DTYPES and tensor.is_cpu and tensor.layout is torch.strided and not divided:
        return tensor
    if divided:
        raise TypeError(f"{name} is divided among ranks: pass {name}.full_tensor() or {name}.to_local(). [BG401]")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is sparse ({tensor.layout}): pass {name}.to_dense(). [BG401]")
    if tensor.dtype.is_complex:
        raise TypeError(f"{name} has dtype {tensor.dtype}: pass torch.view_as_real({name}). [BG401]")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {tensor.dtype}. Supported: {', '.join(DTYPES.values())}. [BG401]")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name} is on device {tensor.device}: pass a tensor on the CPU or a CUDA device. [BG401]")
    return tensor


def check_alike(send: torch.Tensor, recv: torch.Tensor) -> None:
    """Raises TypeError for tensors of different dtypes or devices."""
    if send.dtype != recv.dtype:
        raise TypeError(f"send_tensor is {send.dtype} and recv_tensor is {recv.dtype}: they must agree. [BG402]")
    if send.device != recv.device:
        raise TypeError(
            f"send_tensor is on {send.device} and recv_tensor on {recv.device}: move one to the other. [BG402]"
        )


@functools.lru_cache(maxsize=256)  # asked in each primitive, and the same few times
def check_reduction(dtype: torch.dtype, op: ReduceOp | int) -> ReduceOp:
    """``op`` as a ReduceOp. Raises ValueError for an unknown number, TypeError where the dtype can't be reduced so."""
    try:
        op = ReduceOp(op)
    except ValueError:
        known = ", ".join(f"{one.name} ({one.value})" for one in ReduceOp)
        raise ValueError(f"{op!r} is not a reduction. Known: {known}. [BG405]") from None
    if dtype.is_floating_point and op in BITWISE:
        raise TypeError(f"{dtype} tensors can't be reduced with {op.name}: it needs integers. [BG405]")
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG):
        raise TypeError(
            f"bool tensors can't be reduced with {op.name}: use MAX (or), MIN (and), BOR, BAND or BXOR. [BG405]"
        )
    return op


def transfer(
    session: Session,
    kind: str,
    send: torch.Tensor | None,
    recv: torch.Tensor | None,
    count: int,
    comm: Members,
    *,
    send_rows: int = 1,
    recv_rows: int = 1,
    op: int = 0,
    root: int = -1,
    together: bool = False,
    codec: Codec | None = None,
) -> None:
    """Carries out one primitive on checked tensors and returns when it is done.

    ``send`` and ``recv`` hold ``send_rows`` and ``recv_rows`` times ``count`` elements; None where this rank gives or
    gets nothing. ``together``: both may lie at the same place, and do where one of them is None. Raises
    CommunicationError; ``recv`` may then hold parts of the result. On a CUDA device "done" is in the order of the
    current stream, and errors come to light at a later call.
    """
    connection = session.connection
    tensor = send if send is not None else recv
    assert tensor is not None
    dtype = DTYPES[tensor.dtype]
    # The core reads elements in a row as they lie in memory.
    source = None if send is None else send if _plain(send) else send.detach().clone(memory_format=CONTIGUOUS)
    target = source if recv is send else recv
    if recv is not None and not _plain(recv):
        target = torch.empty(recv.shape, dtype=recv.dtype, device=recv.device) if recv is not send else source
    if PORT.cuda.holds(tensor):
        words = Operation(comm=0, dtype=connection.dtypes[dtype], count=count, op=op, root=root)
        _on_device(session, kind, words, source, target, comm, together, codec)
    else:
        encoding = () if codec is None else (codec.name, codec.density_units)
        call = connection.call(kind, dtype, op, root, send_rows, recv_rows, together, *encoding)
        give = 0 if source is None else source.data_ptr()
        take = give if target is source else 0 if target is None else target.data_ptr()
        connection.transfer(call, comm.id, count, give, take, tensor.shape)
    if recv is None:
        return
    if target is not recv:
        with torch.no_grad():
            recv.copy_(target)  # type: ignore[arg-type]
    elif not recv.is_inference():
        increment_version(recv)  # autograd notices that a tensor which it saved was changed


def _plain(tensor: torch.Tensor) -> bool:
    """The elements lie in memory one after the other as they are (not negated lazily, as parts of a conjugate)."""
    return tensor.is_contiguous() and not tensor.is_neg()


def _on_device(
    session: Session,
    kind: str,
    words: Operation,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    comm: Members,
    together: bool,
    codec: Codec | None,
) -> None:
    """``transfer`` on contiguous tensors of one device, at least one: submitted in the order of the current stream,
    which then waits for the result."""
    device = devices(session).of(source if source is not None else target)  # type: ignore[arg-type]
    # The device would read there what it has written.
    if source is not None and target is not None and not together and _overlap(source, target):
        source = source.clone()
    if source is not None:
        words["src"], words["shape"] = CudaPlace(source), source.shape
    if target is not None:
        words["dst"] = CudaPlace(target)
    elif together and source is not None:
        words["dst"] = words["src"]
    encoding = AS_IT_IS if codec is None else Encoding(device.codecs[codec.name], codec.density_units)
    with PORT.cuda.by_way_of(comm.stream):
        words["comm"] = comm.twin(device).id
        device.wait(device.submit(request(device.kinds[kind], encoding=encoding, **words)))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, also = one.data_ptr(), other.data_ptr()
    return begin < also + other.numel() * other.element_size() and also < begin + one.numel() * one.element_size()
