"""Primitives on many tensors, or on a Python object: few exchanges instead of many."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm.checks import check_root
from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, Comm
from bagua.torch_api.comm.communicators import communicator_of
from bagua.torch_api.comm.transfer import ReduceOp, check_reduction, check_tensor

PICKLED, FAILED = 0, 1
MAX_OBJECT_BYTES = 1 << 32


def broadcast_coalesced(tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None) -> None:
    """``tensors`` of rank ``src`` replace those of every rank: one broadcast for each dtype and device. Same
    number, sizes and dtypes in the same order everywhere."""
    group = communicator_of(comm)
    if group is NON_COMM_MEMBER:
        return
    check_root(src, group, "src")
    at_root = group.rank() == src
    for flat in _flat_by_dtype(tensors, read=at_root, write=not at_root):
        group.broadcast(flat, src)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp | int = ReduceOp.SUM, comm: Comm = None
) -> None:
    """Each of ``tensors`` = reduction of all ranks' tensors at that place: one all-reduce for each dtype and
    device. Same number, sizes and dtypes in the same order everywhere."""
    group = communicator_of(comm)
    if group is NON_COMM_MEMBER:
        return
    for tensor in tensors:
        check_reduction(check_tensor(tensor, "tensors").dtype, op)
    for flat in _flat_by_dtype(tensors, read=True, write=True):
        group.allreduce_inplace(flat, ReduceOp(op))


def _flat_by_dtype(tensors: Sequence[torch.Tensor], *, read: bool, write: bool) -> Iterator[torch.Tensor]:
    """For each dtype and device, in the order of their first tensors, all elements in one flat tensor: filled if
    ``read``, and copied back when the caller has gone on if ``write``. Checks all before it gives out the first."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for number, tensor in enumerate(tensors):
        plain = check_tensor(tensor, f"tensors[{number}]")
        alike.setdefault((plain.dtype, plain.device), []).append(plain)
    for (dtype, device), some in alike.items():
        parts = [tensor.detach() for tensor in some]
        flat = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=device)
        places = torch.split(flat, [part.numel() for part in parts])
        if read:
            for place, part in zip(places, parts, strict=True):
                place.view(part.shape).copy_(part)
        yield flat
        if write:
            with torch.no_grad():
                for place, part in zip(places, parts, strict=True):
                    part.copy_(place.view(part.shape))


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Returns ``obj`` of rank ``src`` on every rank; objects of other ranks are ignored. Non-members get theirs back.

    The object travels as a pickle, and unpickling runs code of the sender's choice. The sender is a rank of the same
    job, which runs the same user's program: its messages come through memory of this host's daemon, or over connections
    between the job's hosts, whose every byte beyond loopback is encrypted and authenticated with keys of this job.
    Nobody else can send one or change one. With ``bagua daemon --plain-data`` that holds only as far as the network
    between the hosts is protected: somebody who can change its traffic can then run code in the ranks.

    Raises pickle's error on ``src``, and CommunicationError with its words on the others.
    """
    group = communicator_of(comm)
    if group is NON_COMM_MEMBER:
        return obj
    check_root(src, group, "src")
    at_root = group.rank() == src
    header = torch.zeros(2, dtype=torch.int64, device="cpu")  # rank ``src`` alone knows the size: it is told first
    content = torch.empty(0, dtype=torch.uint8, device="cpu")
    failure: Exception | None = None
    if at_root:
        try:
            data, kind = pickle.dumps(obj), PICKLED
        except Exception as error:  # whatever pickle or a __reduce__ raises: the others wait for an answer
            failure, data, kind = error, f"{type(error).__name__}: {error}".encode(), FAILED
        if len(data) > MAX_OBJECT_BYTES:
            failure = ValueError(
                f"obj is {len(data)} bytes as a pickle, at most {MAX_OBJECT_BYTES}: send its tensors. [BG408]"
            )
            data, kind = str(failure).encode(), FAILED
        header[0], header[1] = kind, len(data)
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.broadcast(header, src)
    if not at_root:
        size = int(header[1])
        if not 0 <= size <= MAX_OBJECT_BYTES:  # the number comes from another rank: no memory for nonsense
            raise CommunicationError(
                f"Rank {group.ranks[src]} announced an object of {size} bytes, which can't be. [BG504]"
            )
        content = torch.empty(size, dtype=torch.uint8, device="cpu")
    group.broadcast(content, src)
    if failure is not None:
        raise failure
    if at_root:
        return obj
    received = bytes(content.untyped_storage())
    if int(header[0]) == FAILED:
        raise CommunicationError(f"Rank {group.ranks[src]} could not pickle its object: {received.decode()} [BG408]")
    return pickle.loads(received)
