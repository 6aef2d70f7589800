"""Bytes that the members of a generation tell each other when they enter it, over the communicator of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import ReduceOp, transfer
from bagua.torch_api.join.session import Session


def whole_generation(session: Session) -> Members:
    """All ranks of the present generation, those that rest among them."""
    membership = session.membership
    return Members(0, range(membership.world_size), membership.rank)


def gather_rows(session: Session, data: bytes) -> list[bytes]:
    """Equally long bytes of every rank."""
    world = whole_generation(session)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = bytearray(len(data) * world.nranks())
    target = torch.frombuffer(everyone, dtype=torch.uint8)
    transfer(session, "allgather", mine, target, len(data), world, recv_rows=world.nranks())
    return [bytes(everyone[begin : begin + len(data)]) for begin in range(0, len(everyone), len(data))]


def gather_texts(session: Session, text: bytes) -> list[bytes]:
    """The text of every rank."""
    lengths = [int.from_bytes(one, "little") for one in gather_rows(session, len(text).to_bytes(8, "little"))]
    rows = gather_rows(session, text.ljust(max(lengths), b"\0"))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(session: Session, data: bytes, root: int) -> bytes:
    """The bytes of rank ``root``, at least one; others pass anything."""
    world = whole_generation(session)
    gives = world.rank() == root
    length = torch.tensor([len(data)], device="cpu")
    _broadcast(session, length, world, root, gives)
    held = bytearray(data) if gives else bytearray(int(length.item()))
    _broadcast(session, torch.frombuffer(held, dtype=torch.uint8), world, root, gives)
    return bytes(held)


def _broadcast(session: Session, tensor: torch.Tensor, world: Members, root: int, gives: bool) -> None:
    give, take = (tensor, None) if gives else (None, tensor)
    transfer(session, "broadcast", give, take, tensor.numel(), world, root=root, together=gives)


def largest(session: Session, numbers: Sequence[int]) -> list[int]:
    """Of each of these numbers, which are as many on all ranks, the largest one that a rank has."""
    if not numbers:
        return []
    held = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
    transfer(
        session,
        "allreduce",
        held,
        held,
        held.numel(),
        whole_generation(session),
        op=ReduceOp.MAX,
        together=True,
    )
    return held.tolist()
