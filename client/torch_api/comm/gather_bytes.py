"""Bytes that the members of a generation tell each other when they enter it, over the communicator of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import ReduceOp, transfer
from bagua.torch_api.job.session import Session


def whole_generation(session: Session) -> Members:
    """Returns all ranks of the present generation, with those that rest."""
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


def gather_texts(session: Session, texts: Sequence[bytes]) -> list[list[bytes]]:
    """The texts of every rank, as many on each. All tell the short ones, and digests of the others. Of long texts that
    are equal one rank sends its own, so that little travels where many ranks say the same."""
    mine = b"".join(map(_key, texts))
    rows = gather_rows(session, mine)
    found: list[list[bytes]] = [[] for _ in rows]
    for number, text in enumerate(texts):
        column = [row[number * _KEY_BYTES : (number + 1) * _KEY_BYTES] for row in rows]
        for told, one in zip(found, _gather_column(session, column, text), strict=True):
            told.append(one)
    return found


_KEY_BYTES, _LENGTH_BYTES = 64, 4
SHORT = _KEY_BYTES - _LENGTH_BYTES  # bytes


def _key(text: bytes) -> bytes:  # the length, so that receivers have room
    words = text if len(text) <= SHORT else hashlib.blake2b(text, digest_size=16).digest()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + words.ljust(SHORT, b"\0")


def _gather_column(session: Session, column: Sequence[bytes], text: bytes) -> list[bytes]:
    lengths = [int.from_bytes(key[:_LENGTH_BYTES], "little") for key in column]
    known = {
        key: key[_LENGTH_BYTES : _LENGTH_BYTES + length]
        for key, length in zip(column, lengths, strict=True)
        if length <= SHORT
    }
    senders = senders_of([None if key in known else key for key in column])
    if senders is None:
        # All send at once: that many broadcasts would cost more.
        rows = gather_rows(session, text.ljust(max(lengths), b"\0"))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]
    known |= {column[rank]: _broadcast_known(session, text, rank, lengths[rank]) for rank in senders}
    return [known[key] for key in column]


MOST_SENDERS = 8


def senders_of(keys: Sequence[bytes | None]) -> list[int] | None:
    """The first rank of each key; None has no sender. Returns None if there are so many that all send at once."""
    first = {key: rank for rank, key in reversed(list(enumerate(keys))) if key is not None}  # the first rank stays
    return sorted(first.values()) if len(first) <= MOST_SENDERS else None


def _broadcast_known(session: Session, text: bytes, root: int, length: int) -> bytes:
    """The bytes of rank ``root``, whose number all know: more than 0. Others pass anything."""
    world = whole_generation(session)
    gives = world.rank() == root
    held = bytearray(text) if gives else bytearray(length)
    tensor = torch.frombuffer(held, dtype=torch.uint8)
    give, take = (tensor, None) if gives else (None, tensor)
    transfer(session, "broadcast", give, take, length, world, root=root, together=gives)
    return bytes(held)


def largest(session: Session, numbers: Sequence[int]) -> list[int]:
    """Returns, for each of these numbers, the largest that any rank has. All ranks give as many."""
    if not numbers:
        return []
    held = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
    world = whole_generation(session)
    transfer(session, "allreduce", held, held, held.numel(), world, op=ReduceOp.MAX, together=True)
    return held.tolist()
