"""Rows that the ranks of one host write into each other's memory: each is copied once, and no daemon takes part.

Each rank offers a block of its memory, the others write their rows there, and a meeting tells that all have written. A
meeting is a small all-reduce, which ranks of one host do among themselves (csrc/core/channel/meeting.h). The meeting
at the end of one exchange may carry the offers for the next one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import DTYPES, ReduceOp
from bagua.torch_api.join.session import Session
from bagua.torch_api.join.shared_memory import tensor_on
from bagua.torch_api.join.stages import PeerStages

if TYPE_CHECKING:
    from bagua.csrc import core

Span = tuple[int, int]
"""First row, number of rows."""
Write = Callable[[int, int, torch.Tensor], None]
"""Writes rows from the first number to before the second one into a tensor."""
WORDS = 4  # of an offer


@dataclass(frozen=True)
class Block:
    """Memory that a rank offers. ``tensor``: uint8, as many as ``nbytes`` or more."""

    tensor: torch.Tensor
    segment: int
    nbytes: int


@dataclass(frozen=True)
class Offer:
    """A block as the other ranks hear of it. ``freed``: how many segments its owner had freed by then. ``dtype``: of the
    rows that are, or were, on their way."""

    segment: int
    nbytes: int
    freed: int
    dtype: int


class PeerMemory:
    """Blocks of this rank, and those of others that it has mapped. One for a session."""

    def __init__(self, session: Session) -> None:
        self._connection = session.connection
        self._stages = PeerStages(session)
        self._mapped: dict[int, tuple[int, dict[int, torch.Tensor]]] = {}  # owner -> freed so far, tensors by segment

    def block(self, nbytes: int) -> Block:
        """Memory of this rank. It is used again when the tensor and its views are gone."""
        if nbytes == 0:
            return Block(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0)
        tensor, (segment, _) = self._stages.place(nbytes, torch.uint8)
        return Block(tensor, segment, nbytes)

    def offer(self, block: Block, dtype: torch.dtype) -> list[int]:
        """The words of an ``Offer``."""
        return [block.segment, block.nbytes, self._stages.freed, self._connection.dtypes[DTYPES[dtype]]]

    def of(self, owner: int, offer: Offer) -> torch.Tensor:
        """uint8, the block that member ``owner`` offers. What it had offered before and freed since is unmapped."""
        freed, known = self._mapped.get(owner, (offer.freed, {}))
        if freed < offer.freed:
            known = {}
        self._mapped[owner] = max(freed, offer.freed), known
        if offer.segment not in known:
            segment: core.Segment = self._connection.borrow(owner, offer.segment)
            known[offer.segment] = tensor_on(segment, segment.nbytes, torch.uint8, _nothing)
        return known[offer.segment]


def _nothing(_: core.Segment) -> None:
    """The mapping goes with its last tensor."""


class SharedRows:
    """Exchanges of rows between the ranks of ``group``, all on one host, one after the other. All ranks make the same
    calls with the same numbers."""

    def __init__(self, session: Session, group: Members) -> None:
        self._connection = session.connection
        self._memory = session.keep(PeerMemory)
        self._group = group
        self._mine = self._memory.block(0)
        self._offers: list[Offer] = []  # of all ranks, in the last meeting; empty: none were made

    def meet(self, dtype: torch.dtype, nbytes: int = 0, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Returns when all ranks have come, with their ``numbers``, as many from each. With ``nbytes`` each rank offers
        so much memory for the next exchange. Raises BaguaError where ranks' dtypes differ, CommunicationError."""
        n, me, width = self._group.nranks(), self._group.rank(), WORDS + len(numbers)
        self._mine = self._memory.block(nbytes)
        given = array("q", bytes(8 * n * width))
        found = array("q", bytes(8 * n * width))
        given[me * width : (me + 1) * width] = array("q", [*self._memory.offer(self._mine, dtype), *numbers])
        connection = self._connection
        connection.transfer(
            self._group.id,
            connection.kinds["allreduce"],
            connection.dtypes["int64"],
            int(ReduceOp.SUM),
            -1,
            len(given),
            given.buffer_info()[0],
            1,
            found.buffer_info()[0],
            1,
            True,
            (n, width),
            0,
            0,
        )
        rows = found.tolist()
        told = [rows[at : at + width] for at in range(0, n * width, width)]
        self._offers = [Offer(*words[:WORDS]) for words in told]
        if any(one.dtype != self._offers[0].dtype for one in self._offers):
            names = {number: name for name, number in connection.dtypes.items()}
            each = zip(self._group.ranks, self._offers, strict=True)
            kinds = ", ".join(f"rank {rank}: {names.get(one.dtype)}" for rank, one in each)
            raise BaguaError(f"The ranks exchange rows of different dtypes ({kinds}): use the same on every rank.")
        return [words[WORDS:] for words in told]

    def carry(
        self,
        gives: Sequence[Sequence[Span]],
        lands: Sequence[Sequence[int]],
        arrive: Sequence[int],
        like: torch.Tensor,
        write: Write,
        following: int | None = None,
    ) -> torch.Tensor:
        """Returns the rows that came, [arrive[this rank], width], in the width and dtype of ``like``.

        Args:
            gives: Of each rank, the spans of this rank's rows that go there.
            lands: Of each rank and span, the row there at which they begin.
            arrive: How many rows come to each rank.
            like: A tensor of the same width and dtype.
            write: Writes this rank's rows.
            following: Bytes that this rank will need for the next exchange, known on all ranks or on none.
        """
        width, me = like.shape[1], self._group.rank()
        size = width * like.element_size()
        if not self._offers or any(one.nbytes < rows * size for one, rows in zip(self._offers, arrive, strict=True)):
            self.meet(like.dtype, arrive[me] * size)
        mine = _as_rows(self._mine.tensor, arrive[me], like)
        for rank, (spans, begins) in enumerate(zip(gives, lands, strict=True)):
            target = mine if rank == me else None
            for (begin, count), at in zip(spans, begins, strict=True):
                if count == 0:
                    continue
                if target is None:
                    memory = self._memory.of(self._group.numbers[rank], self._offers[rank])
                    target = _as_rows(memory, arrive[rank], like)
                write(begin, begin + count, target[at : at + count])
        self.meet(like.dtype, following or 0)
        if following is None:
            self._offers = []
        return mine


def _as_rows(memory: torch.Tensor, rows: int, like: torch.Tensor) -> torch.Tensor:
    """The beginning of uint8 ``memory`` as [rows, width of ``like``]."""
    width = like.shape[1]
    return memory[: rows * width * like.element_size()].view(like.dtype).view(rows, width)
