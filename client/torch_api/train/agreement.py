"""Messages between ranks when a model is wrapped: descriptions, plain data, tensors. No pickle travels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.state_copy import elements_of
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job.session import Session

PACK_BYTES = 8 << 20
ALIGNMENT = 16
MAX_TEXT_BYTES = 1 << 30


def gather_texts(text: bytes, group: Communicator) -> list[bytes]:
    """Returns every rank's ``text``, in the order of ranks. Where all are equal, only digests travel."""
    # The length, so that all can pad where texts differ.
    digest = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    digests = _gather_bytes(digest, group)
    if all(other == digest for other in digests):
        return [text] * group.nranks()
    lengths = [int.from_bytes(other[-8:], "little") for other in digests]
    rows = _gather_bytes(text.ljust(max(lengths)), group)  # all-gather takes equally many bytes from each rank
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def raise_together(mistake: Exception | None, group: Communicator) -> None:
    """Raises on every rank if one of them has a ``mistake``: its own there, elsewhere a BaguaError with its words."""
    texts = gather_texts(str(mistake).encode() if mistake is not None else b"", group)
    if mistake is not None:
        raise mistake  # a rank's own error keeps its traceback
    told = [f"rank {group.ranks[index]}: {text.decode()}" for index, text in enumerate(texts) if text]
    if told:
        raise BaguaError(f"Another rank failed. {'; '.join(told)} [BG511]")


def _gather_bytes(data: bytes, group: Communicator) -> list[bytes]:
    """Equally long bytes of every rank."""
    everyone = bytearray(len(data) * group.nranks())
    group.allgather(torch.frombuffer(bytearray(data), dtype=torch.uint8), torch.frombuffer(everyone, dtype=torch.uint8))
    return [bytes(everyone[begin : begin + len(data)]) for begin in range(0, len(everyone), len(data))]


def broadcast_json(document: Any, group: Communicator, root: int = 0) -> Any:
    """The ``document`` (plain data) of rank ``root``, on every rank."""
    text = json.dumps(document).encode() if group.rank() == root else b""
    length = torch.tensor([len(text)], device="cpu")
    group.broadcast(length, root)
    size = int(length.item())
    if not 0 < size <= MAX_TEXT_BYTES:  # the number comes from another rank
        raise BaguaError(f"Rank {root} announced a description of {size} bytes, which can't be. [BG504]")
    received = bytearray(text) or bytearray(size)
    group.broadcast(torch.frombuffer(received, dtype=torch.uint8), root)
    return json.loads(received)


def broadcast_tensors(tensors: Sequence[torch.Tensor], session: Session, group: Communicator, root: int = 0) -> None:
    """Contents of rank ``root``'s tensors replace everybody's, bit for bit. Any dtype; same shapes and dtypes
    everywhere.

    They travel packed, so that many small ones cost little, and through memory of their own device.
    """
    for some in by_device(tensors):
        _broadcast_through(stage_beside(some[0], PACK_BYTES, session), some, group, root)


def stage_beside(tensor: torch.Tensor, nbytes: int, session: Session) -> torch.Tensor:
    """Bytes that can be communicated, on this tensor's device."""
    if PORT.cuda.holds(tensor):
        return torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    return session.memory.empty(nbytes, torch.uint8)


def by_device(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one device together, in the same order on all ranks, the CPU's first."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return [found[device] for device in sorted(found, key=lambda device: (device.type, device.index or 0))]


def _broadcast_through(stage: torch.Tensor, tensors: Sequence[torch.Tensor], group: Communicator, root: int) -> None:
    """``broadcast_tensors`` for tensors of one device, in packs that fit into ``stage``."""
    settable = [elements_of(tensor) for tensor in tensors]
    # Bytes are copied: a lazy conjugate or sign would get lost.
    plain = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in settable]
    for pack in _packs([tensor.view(-1).view(torch.uint8) for tensor in plain if tensor.numel()]):
        end = pack[-1][0] + pack[-1][1].numel()
        if group.rank() == root:
            for begin, data in pack:
                stage[begin : begin + data.numel()] = data
        group.broadcast(stage[:end], root)
        if group.rank() != root:
            for begin, data in pack:
                data.copy_(stage[begin : begin + data.numel()])
    for tensor, received in zip(settable, plain, strict=True):  # tensors that had to be copied into a row
        if received is not tensor:
            tensor.copy_(received)


def _packs(everything: Sequence[torch.Tensor]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Lists of (begin, bytes): where bytes of a tensor lie in a pack. Large tensors come in several pieces."""
    pack: list[tuple[int, torch.Tensor]] = []
    begin = 0
    for data in everything:
        done = 0
        while done < data.numel():
            if begin >= PACK_BYTES:
                yield pack
                pack, begin = [], 0
            size = min(data.numel() - done, PACK_BYTES - begin)
            pack.append((begin, data[done : done + size]))
            done += size
            begin += -(-size // ALIGNMENT) * ALIGNMENT
    if pack:
        yield pack
