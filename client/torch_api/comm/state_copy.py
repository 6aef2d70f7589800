"""Copies tensors from members that hold a job's state to newcomers: in stripes from several, checked by checksums."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from typing import Any

import torch

from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.comm.gather_bytes import gather_rows, largest
from bagua.torch_api.comm.stripes import ALIGNMENT, Piece, length, packs, stripes
from bagua.torch_api.job.connection import NOWHERE, Place, request
from bagua.torch_api.job.session import Session

# Together as little as keeps links busy: while all wait for newcomers, the daemon makes stages, at about 1 GB/s.
PACK_BYTES = 1 << 20
PACKS_UNDER_WAY = 4
MOST_SENDERS = 8
UNKNOWN = -(1 << 40)  # below all checksums, and their negatives


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of its elements, to be read and set: where it is expanded each stands once."""
    found = tensor.detach()
    if 0 in found.stride() and found.numel():  # a copy into an expanded tensor would write each element several times
        found = found[tuple(slice(None) if stride else 0 for stride in found.stride())]
    return found


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor whose elements lie in order, without gaps; else a copy in order, because the tensor of
    another rank may lie otherwise. Of a tensor on a GPU it is a copy on the host."""
    # Bytes are copied: a lazy conjugate or sign would get lost.
    plain = elements_of(tensor).resolve_conj().resolve_neg()
    # Sends and receives of state go through memory of the host.
    return plain.contiguous().cpu().view(-1).view(torch.uint8)


class StateCopy:
    """One copy of ``tensors``, which have the same shapes and dtypes on all ranks, in the same order. ``whole``: ranks
    that hold the state. All others get it. With islands: of those at this rank's position."""

    def __init__(self, session: Session, tensors: Sequence[torch.Tensor], whole: Sequence[int]) -> None:
        self._session = session
        self._tensors = tensors
        self._bytes = [flat_bytes(tensor) for tensor in tensors]
        self._sizes = [one.numel() for one in self._bytes]
        self._rank = session.membership.rank
        self._newcomer = self._rank not in whole
        self._newcomers = [rank for rank in session.membership.alike if rank not in whole]
        self._whole = whole
        self._senders: list[int] = []
        self._most = 0  # tensors on a rank: their number may differ with the position in an island

    def run(self) -> None:
        """Raises BaguaError on a newcomer at which something else arrived than the first sender has."""
        alike = self._ranks_alike()
        self._senders = _choose_senders(self._session.membership.hosts, alike)
        # Tensors may differ between ranks: such ones come from the first alone.
        wanted, differing = self._compare(self._rank in alike)
        shares = stripes(self._sizes, len(self._senders), differing)
        if self._newcomer:
            self._receive(shares)
            self._check(wanted)
        elif self._rank in self._senders:
            self._send(shares[self._senders.index(self._rank)])

    def _ranks_alike(self) -> list[int]:
        """Returns the ranks, of those that hold the state, whose tensors have the sizes of the first one's. Raises
        BaguaError on a newcomer with others."""
        sizes = hashlib.blake2b(repr(self._sizes).encode(), digest_size=16).digest() + len(self._sizes).to_bytes(8)
        rows = gather_rows(self._session, sizes)
        first = rows[min(self._whole)]
        self._most = max(int.from_bytes(row[-8:]) for row in rows)
        if self._newcomer and sizes != first:
            raise BaguaError(
                f"The state has {int.from_bytes(first[-8:])} tensors, and this rank made room for {len(self._sizes)}, "
                "or has others. [BG603]"
            )
        return [rank for rank in self._whole if rows[rank] == first]

    def _compare(self, gives: bool) -> tuple[list[int], list[int]]:
        """The checksums of the first sender, and the tensors that differ between those that hold the state."""
        unknown = [UNKNOWN] * len(self._sizes)
        mine = [self._checksum(one) for one in self._bytes] if gives and not self._newcomer else unknown
        first = mine if self._rank == self._senders[0] else unknown
        # One reduction, MAX, finds the lowest, too, with its sign turned.
        told = [*mine, *first, *(UNKNOWN if one == UNKNOWN else -one for one in mine)]
        most, count = self._largest(told), len(mine)
        highest, wanted, lowest = most[:count], most[count : 2 * count], most[2 * count :]
        return wanted, [item for item in range(count) if highest[item] != -lowest[item]]

    def _largest(self, mine: Sequence[int]) -> list[int]:
        """The largest of each of these numbers on ranks that hold, or get, the same shards."""
        place, places = self._session.membership.place, self._session.membership.island_size
        begin, each = place * self._most * 3, self._most * 3
        numbers = [UNKNOWN] * (each * places)
        numbers[begin : begin + len(mine)] = mine
        return largest(self._session, numbers)[begin : begin + len(mine)]

    def _checksum(self, data: torch.Tensor) -> int:
        memory: Any = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
        return self._session.connection.checksum(memory)

    def _check(self, wanted: Sequence[int]) -> None:
        damaged = [item for item, one in enumerate(self._bytes) if self._checksum(one) != wanted[item]]
        if damaged:
            raise BaguaError(
                f"{len(damaged)} of {len(wanted)} tensors arrived with other contents than member "
                f"{self._session.membership.members[self._senders[0]]} has. [BG504]"
            )
        with torch.no_grad():
            for tensor, held in zip(map(elements_of, self._tensors), self._bytes, strict=True):
                # A copy in order was filled: its elements go to the tensor.
                if tensor.numel() and held.data_ptr() != tensor.data_ptr():
                    tensor.copy_(held.view(tensor.dtype).view(tensor.shape))

    def _submit(self, kind: str, peer: int, place: Place, count: int) -> int:
        connection = self._session.connection
        src, dst = (place, NOWHERE) if kind == "send" else (NOWHERE, place)
        return connection.submit(
            request(
                connection.kinds[kind],
                comm=0,  # 0: all ranks of the generation, newcomers among them
                dtype=connection.dtypes["uint8"],
                count=count,
                root=peer,
                src=src,
                dst=dst,
                label="state for newcomers",
            )
        )

    def _send(self, stripe: Sequence[Piece]) -> None:
        with _Line(self._session, stripe) as line:
            for pack in packs(stripe, PACK_BYTES):
                stage, place = line.next_stage()
                for begin, piece in pack:
                    stage[begin : begin + piece.end - piece.begin] = self._bytes[piece.item][piece.begin : piece.end]
                line.began([self._submit("send", peer, place, length(pack)) for peer in self._newcomers])

    def _receive(self, shares: Sequence[Sequence[Piece]]) -> None:
        with ExitStack() as lines:
            senders = [
                self._receive_from(peer, lines.enter_context(_Line(self._session, share)), share)
                for peer, share in zip(self._senders, shares, strict=True)
            ]
            # A deque of length 0 runs the generators to their end, and keeps nothing.
            deque(zip_longest(*senders), maxlen=0)  # a pack of each in turn

    def _receive_from(self, peer: int, line: _Line, stripe: Sequence[Piece]) -> Iterator[None]:
        for pack in packs(stripe, PACK_BYTES):
            stage, place = line.next_stage()
            line.began([self._submit("recv", peer, place, length(pack))], functools.partial(self._take, stage, pack))
            yield

    def _take(self, stage: torch.Tensor, pack: Sequence[tuple[int, Piece]]) -> None:
        for begin, piece in pack:
            self._bytes[piece.item][piece.begin : piece.end] = stage[begin : begin + piece.end - piece.begin]


class _Line:
    """Stages in shared memory for what goes from one rank to another, used in turns: one is filled, or emptied, while
    another is under way. At the end of its block all has arrived."""

    def __init__(self, session: Session, pieces: Sequence[Piece]) -> None:
        self._session = session
        nbytes = min(PACK_BYTES, max(sum(-(-(end - begin) // ALIGNMENT) * ALIGNMENT for _, begin, end in pieces), 1))
        self._stages = [session.memory.place_empty(nbytes, torch.uint8) for _ in range(PACKS_UNDER_WAY)]
        self._under_way: deque[tuple[list[int], Callable[[], None]]] = deque()

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while self._under_way:
            if kind is None:
                self._wait()
            else:
                # The first error is the reason: those of other operations follow from it.
                with suppress(CommunicationError):
                    self._wait()

    def next_stage(self) -> tuple[torch.Tensor, Place]:
        """Returns a stage with which nothing is under way."""
        if len(self._under_way) == len(self._stages):
            self._wait()
        self._stages.append(self._stages.pop(0))
        return self._stages[-1]

    def began(self, tickets: list[int], then: Callable[[], None] = lambda: None) -> None:
        """Notes that these operations use the stage. ``then`` is called when they are over."""
        self._under_way.append((tickets, then))

    def _wait(self) -> None:
        tickets, then = self._under_way.popleft()
        for ticket in tickets:
            self._session.connection.wait(ticket)
        then()


def _choose_senders(hosts: Sequence[Sequence[int]], whole: Sequence[int]) -> list[int]:
    """Some of the ranks that hold the state, the lowest first, then from as many hosts as possible."""
    by_host = [[rank for rank in host if rank in whole] for host in hosts]
    turns = zip_longest(*by_host)
    found = [rank for turn in turns for rank in turn if rank is not None]
    # The first rank's tensors count where ranks differ.
    return sorted(found[:MOST_SENDERS], key=lambda rank: (rank != min(whole), rank))
