"""Rows that the ranks of one host write into each other's memory: each is copied once, and no daemon takes part.

Each rank offers a block of its memory, the others write their rows there, and a meeting tells that all have written. A
meeting is a small all-reduce, which ranks of one host do among themselves (csrc/core/channel/meeting.h). The meeting
at the end of one exchange may carry the offers for the next one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import DTYPES, ReduceOp
from bagua.torch_api.job.session import Session
from bagua.torch_api.job.shared_memory import tensor_on
from bagua.torch_api.job.stages import Stages

if TYPE_CHECKING:
    from bagua.csrc import core

Span = tuple[int, int]
"""First row, number of rows."""
Write = Callable[[int, int, torch.Tensor], None]
"""Writes rows from the first number to before the second one into a tensor."""
WORDS = 4
"""Of an offer: the segment, its bytes, how many segments its owner had freed by then, the dtype of the rows."""
SUM = int(ReduceOp.SUM)


@dataclass(frozen=True)
class Block:
    """Memory that a rank offers. ``tensor``: uint8, as many as ``nbytes`` or more."""

    tensor: torch.Tensor
    segment: int
    nbytes: int


class Words:
    """Memory for the words of all ranks in a meeting: ``given`` has those of this rank and zeros, ``found`` gets the
    sum."""

    def __init__(self, n: int, width: int) -> None:
        self.given = array("q", bytes(8 * n * width))
        self.found = array("q", bytes(8 * n * width))
        self.places = self.given.buffer_info()[0], self.found.buffer_info()[0]


class PeerMemory:
    """Blocks of this rank, and those of others that it has mapped. One for a session."""

    def __init__(self, session: Session) -> None:
        self._connection = session.connection
        self._stages = Stages(session, for_peers=True)
        self._nothing = Block(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0)
        self._freed: dict[int, int] = {}  # by owner
        self._mapped: dict[int, dict[tuple[Any, ...], torch.Tensor]] = {}  # by owner, then by segment and form
        self._words: dict[tuple[int, ...], Words] = {}
        self.dtypes = {dtype: self._connection.dtypes[name] for dtype, name in DTYPES.items()}

    @property
    def freed(self) -> int:
        """Number of this rank's segments that others may forget."""
        return self._stages.freed

    def block(self, nbytes: int) -> Block:
        """Memory of this rank. It is used again when the tensor and its views are gone."""
        if nbytes == 0:
            return self._nothing
        tensor, (segment, _) = self._stages.place(nbytes, torch.uint8)
        return Block(tensor, segment, nbytes)

    def of(self, owner: int, segment: int, freed: int, like: torch.Tensor) -> torch.Tensor:
        """The block that member ``owner`` offers as rows like those of ``like``, as many as fit. What it had offered
        before and has freed since is unmapped."""
        if self._freed.get(owner, -1) < freed:
            self._freed[owner], self._mapped[owner] = freed, {}  # mappings of freed segments would keep their memory
        known = self._mapped[owner]
        key = segment, like.dtype, like.shape[1]
        if key not in known:
            borrowed = self._connection.borrow(owner, segment)
            whole = tensor_on(borrowed, borrowed.nbytes, torch.uint8, _forget)
            size = like.shape[1] * like.element_size()
            known[key] = as_rows(whole, borrowed.nbytes // max(1, size), like)
        return known[key]

    def words(self, group: Members, width: int) -> Words:
        """Returns the memory for meetings of this group, the same each time."""
        key = group.id, group.nranks(), width
        if key not in self._words:
            self._words[key] = Words(group.nranks(), width)
        return self._words[key]


def _forget(_: core.Segment) -> None:
    """The mapping goes with its last tensor."""


class SharedRows:
    """Exchanges of rows between the ranks of ``group``, all on one host, one after the other. All ranks make the same
    calls with the same numbers."""

    def __init__(self, session: Session, group: Members) -> None:
        self._connection = session.connection
        self._memory = session.keep(PeerMemory)
        self._group = group
        self._n, self._me = group.nranks(), group.rank()
        self._mine = self._memory.block(0)
        self._offers: list[list[int]] = []  # words of all ranks in the last meeting; empty: no offers were made

    def meet(self, dtype: torch.dtype, nbytes: int = 0, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Returns when all ranks have come, with their ``numbers``, as many from each. With ``nbytes`` each rank offers
        so much memory for the next exchange. Raises BaguaError where ranks' dtypes differ, CommunicationError."""
        n, width, memory, connection = self._n, WORDS + len(numbers), self._memory, self._connection
        mine = self._mine = memory.block(nbytes)
        words = memory.words(self._group, width)
        begin = self._me * width
        own = array("q", (mine.segment, mine.nbytes, memory.freed, memory.dtypes[dtype], *numbers))
        words.given[begin : begin + width] = own
        call = connection.call("allreduce", "int64", SUM, -1, 1, 1, True)
        connection.transfer(call, self._group.id, n * width, *words.places, (n, width))
        every = words.found.tolist()
        self._offers = [every[at : at + width] for at in range(0, n * width, width)]
        dtypes = every[WORDS - 1 :: width]  # one word of each rank: rows of another dtype would be read as garbage
        if dtypes.count(dtypes[0]) < n:
            names = {number: name for name, number in connection.dtypes.items()}
            each = zip(self._group.ranks, dtypes, strict=True)
            kinds = ", ".join(f"rank {rank}: {names.get(one)}" for rank, one in each)
            raise BaguaError(
                f"The ranks exchange rows of different dtypes ({kinds}): use the same on every rank. [BG402]"
            )
        return [row[WORDS:] for row in self._offers] if numbers else []

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
        me, size = self._me, like.shape[1] * like.element_size()
        # An offer of the last meeting serves if it is large enough on all ranks.
        if not self._offers or any(offer[1] < rows * size for offer, rows in zip(self._offers, arrive, strict=True)):
            self.meet(like.dtype, arrive[me] * size)
        mine = as_rows(self._mine.tensor, arrive[me], like)
        for rank, (spans, begins) in enumerate(zip(gives, lands, strict=True)):
            target = mine if rank == me else None
            for (begin, count), at in zip(spans, begins, strict=True):
                if count == 0:
                    continue
                if target is None:
                    segment, _, freed, *_ = self._offers[rank]
                    target = self._memory.of(self._group.numbers[rank], segment, freed, like)
                write(begin, begin + count, target.narrow(0, at, count))
        self.meet(like.dtype, following or 0)  # tells that all have written, and offers memory for the next exchange
        if following is None:  # memory was not offered
            self._offers = []
        return mine


def as_rows(memory: torch.Tensor, rows: int, like: torch.Tensor) -> torch.Tensor:
    """The beginning of uint8 ``memory`` as [rows, width of ``like``]."""
    width = like.shape[1]
    return memory.narrow(0, 0, rows * width * like.element_size()).view(like.dtype).view(rows, width)
