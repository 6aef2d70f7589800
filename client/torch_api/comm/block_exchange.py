"""Blocks of any size between all ranks, as sends and receives, of which a limited number is under way at a time.

``exchange_blocks`` takes tensors at any place, and copies them. ``RowExchange`` has memory of its own for rows, which
its caller fills and reads.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import DTYPES, Carried, check_alike, check_tensor
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job.connection import NOWHERE, Connection, Place, request
from bagua.torch_api.job.session import Session
from bagua.torch_api.job.stages import Stages


@dataclass(frozen=True)
class RankBlocks:
    """Parts of a tensor, one for each rank."""

    tensor: torch.Tensor
    counts: list[int]
    displs: list[int]
    name: str

    @classmethod
    def of(cls, carried: Carried, counts: Sequence[int], displs: Sequence[int], n: int, name: str) -> RankBlocks:
        """``n`` blocks. Raises ValueError for lists that are too short or reach beyond the tensor, TypeError for other
        things than lists of whole numbers, and for tensors that can't be communicated."""
        tensor = check_tensor(carried, f"{name}_tensor")
        for what, values in (("counts", counts), ("displs", displs)):
            if len(values) < n:
                raise ValueError(f"{name}_{what} has {len(values)} entries: there are {n} ranks. [BG403]")
            for rank, value in enumerate(values[:n]):
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"{name}_{what}[{rank}] is {value!r}: it must be a whole number. [BG403]")
        for rank, (count, displ) in enumerate(zip(counts[:n], displs[:n], strict=True)):
            if count < 0 or displ < 0 or displ + count > tensor.numel():
                raise ValueError(
                    f"{name}_counts[{rank}]={count} elements from {name}_displs[{rank}]={displ} on do not lie in "
                    f"{name}_tensor, which has {tensor.numel()}. [BG403]"
                )
        return cls(tensor, list(counts[:n]), list(displs[:n]), name)

    def check_apart(self) -> None:
        """Raises ValueError if two blocks overlap."""
        end, owner = 0, 0
        for begin_, count, rank in sorted(zip(self.displs, self.counts, range(len(self.counts)), strict=True)):
            if count and begin_ < end:
                raise ValueError(f"The blocks of {self.name}_tensor for ranks {owner} and {rank} overlap. [BG403]")
            if count:
                end, owner = begin_ + count, rank

    def flat(self) -> torch.Tensor:
        """Returns all elements in a row; a copy if they don't lie so."""
        return self.tensor.detach().reshape(-1)


def exchange_blocks(session: Session, group: Members, gives: RankBlocks, takes: RankBlocks) -> None:
    """Block j of ``gives`` goes to rank j, and block i of ``takes`` comes from rank i.

    Raises TypeError and ValueError where the two don't fit together, CommunicationError where ranks disagree.
    """
    send_tensor, recv_tensor, me = gives.tensor, takes.tensor, group.rank()
    check_alike(send_tensor, recv_tensor)
    takes.check_apart()
    if gives.counts[me] != takes.counts[me]:
        raise ValueError(
            f"This rank, {me}, sends {gives.counts[me]} elements to itself and receives {takes.counts[me]}: both must "
            "agree. [BG403]"
        )
    with torch.no_grad():
        with PORT.cuda.by_way_of(group.stream if PORT.cuda.holds(send_tensor) else None):
            _exchange(_Way(session, group, send_tensor), gives, takes)
        if not recv_tensor.is_inference():  # torch must see that a tensor which autograd has saved was changed
            increment_version(recv_tensor)


class _Way:
    """Connection, communicator and memory for messages of tensors that lie where ``like`` does."""

    def __init__(self, session: Session, group: Members, like: torch.Tensor) -> None:
        self.session = session
        self.connection: Connection = session.connection
        self.group = group
        self.stage: Callable[[int, torch.dtype], tuple[torch.Tensor, Place]]
        self.behind: Callable[[Place, int], Place]
        if PORT.cuda.holds(like):
            self.connection = device = devices(session).of(like)
            self.group = group.twin(device)
            self.stage, self.behind = functools.partial(device.place_empty, device=like.device), device.behind
        else:
            self.stage, self.behind = session.keep(Stages).place, _behind


def _behind(start: Place, nbytes: int) -> Place:
    """The place so many bytes behind the beginning of a stage."""
    segment, offset = start
    return segment, offset + nbytes


def _exchange(where: _Way, gives: RankBlocks, takes: RankBlocks) -> None:
    """Exchanges all blocks through memory of our own. The block of this rank itself goes nowhere."""
    dtype, group = gives.tensor.dtype, where.group
    me = group.rank()
    given, target = gives.flat(), takes.flat()
    out, out_at = where.stage(sum(gives.counts), dtype)
    into, into_at = where.stage(sum(takes.counts), dtype)
    torch.cat([given[at : at + count] for at, count in zip(gives.displs, gives.counts, strict=True)], out=out)
    with _Messages(where, dtype, out, into) as messages:
        for to, source in _turns(group):
            messages.submit("send", to, out_at, sum(gives.counts[:to]), gives.counts[to])
            messages.submit("recv", source, into_at, sum(takes.counts[:source]), takes.counts[source])
        mine, begin_ = gives.counts[me], sum(gives.counts[:me])
        target[takes.displs[me] : takes.displs[me] + mine] = out[begin_ : begin_ + mine]
        messages.wait_for_all()
    for peer, (at, count) in enumerate(zip(takes.displs, takes.counts, strict=True)):
        if peer != me:
            begin_ = sum(takes.counts[:peer])
            target[at : at + count] = into[begin_ : begin_ + count]
    if target.data_ptr() != takes.tensor.data_ptr():  # ``reshape`` had to copy: the tensor gets the result now
        takes.tensor.copy_(target.view(takes.tensor.shape))


def _turns(group: Members) -> Iterator[tuple[int, int]]:
    """(to, source): each rank begins with its next one, so nobody gets all messages at once."""
    n, me = group.nranks(), group.rank()
    return (((me + distance) % n, (me - distance) % n) for distance in range(1, n))


@dataclass(frozen=True)
class Rows:
    """Rows in memory that can be communicated. ``tensor``: [rows, width]."""

    tensor: torch.Tensor
    place: Place


Blocks = Sequence[Sequence[tuple[int, int]]]
"""Of each rank: (first row, number of rows) of its blocks."""


class RowExchange:
    """Rows of ``width`` elements of one dtype and device between the ranks of a communicator."""

    def __init__(self, session: Session, group: Members, like: torch.Tensor, width: int) -> None:
        self._where = _Way(session, group, like)
        self._group = group
        self._dtype, self._width = like.dtype, width

    def rows(self, count: int) -> Rows:
        """Room for so many. It comes back when the tensor and its views are gone."""
        flat, place = self._where.stage(count * self._width, self._dtype)
        return Rows(flat.view(count, self._width), place)

    def run(self, out: Rows, gives: Blocks, into: Rows, takes: Blocks) -> None:
        """The blocks that rank j has in ``gives`` go to it, and those that rank i has in ``takes`` come from it, in
        their order, the same on both ends. Empty blocks do not travel. What this rank has for itself stays where it
        is. Raises CommunicationError."""
        with (
            PORT.cuda.by_way_of(self._group.stream),
            _Messages(self._where, self._dtype, out.tensor, into.tensor) as messages,
        ):
            for to, source in _turns(self._group):
                # In turns: a rank that waits for its oldest block waits for a rank that is less far than it.
                for pair in itertools.zip_longest(_full(takes[source]), _full(gives[to])):
                    for kind, peer, rows, block in zip(("recv", "send"), (source, to), (into, out), pair, strict=True):
                        if block is not None:
                            begin, count = block
                            messages.submit(kind, peer, rows.place, begin * self._width, count * self._width)
            messages.wait_for_all()


def _full(blocks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    return ((begin, count) for begin, count in blocks if count)


class LeftBehind:
    """Messages of a session that nobody waits for any more, after an exception: their memory is not used again while
    they are under way."""

    def __init__(self, _: Session) -> None:
        self._left: list[tuple[Connection, deque[int], tuple[torch.Tensor, ...]]] = []

    def take(self, connection: Connection, tickets: deque[int], memory: tuple[torch.Tensor, ...]) -> None:
        """Keeps ``memory`` until these operations are over."""
        self._left.append((connection, tickets, memory))

    def look(self) -> None:
        """Lets go of memory whose messages are over."""
        for connection, tickets, _ in self._left:
            while tickets and _is_over(connection, tickets[0]):
                tickets.popleft()
        self._left = [entry for entry in self._left if entry[1]]  # entries have tensors: they can't be compared


def _is_over(connection: Connection, ticket: int) -> bool:
    with suppress(CommunicationError):  # it has failed, or has been waited for
        if not connection.done(ticket):
            return False
        connection.wait(ticket)
    return True


class _Messages:
    """Sends and receives under way, in the block of ``with``. The core has room for a limited number."""

    LIMIT = 256  # the core has room for twice as many

    def __init__(self, where: _Way, dtype: torch.dtype, *memory: torch.Tensor) -> None:
        """``memory``: where all blocks lie."""
        self._where = where
        self._connection = where.connection
        self._dtype = dtype
        self._memory = memory
        self._tickets: deque[int] = deque()
        self._left = where.session.keep(LeftBehind)
        self._left.look()

    def __enter__(self) -> _Messages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tickets:
            self._left.take(self._connection, self._tickets, self._memory)

    def submit(self, kind: str, peer: int, start: Place, begin: int, count: int) -> None:
        """``count`` elements from element ``begin`` behind ``start`` on."""
        self.wait(self.LIMIT)
        place = self._where.behind(start, begin * self._dtype.itemsize)
        operation = request(
            self._connection.kinds[kind],
            comm=self._where.group.id,
            dtype=self._connection.dtypes[DTYPES[self._dtype]],
            count=count,
            root=peer,
            src=place if kind == "send" else NOWHERE,
            dst=place if kind == "recv" else NOWHERE,
        )
        self._tickets.append(self._connection.submit(operation))

    def wait(self, left: int) -> None:
        """Returns when at most ``left`` are under way, the newest ones."""
        while len(self._tickets) > left:
            self._connection.wait(self._tickets[0])
            self._tickets.popleft()

    def wait_for_all(self) -> None:
        """Returns when none is under way. The last one is often done last: this rank sleeps once, and finds that the
        others are over."""
        while self._tickets:
            self._connection.wait(self._tickets[-1])
            self._tickets.pop()
