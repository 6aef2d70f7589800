"""Tokens go to the ranks of their experts and come back, and so do gradients.

Between ranks of one host a token is copied once, into memory of the rank that gets it (``comm/shared_rows.py``). To
other hosts, and from memory of a GPU, it is copied into memory that the daemon sees; the daemon moves it into memory
from which the expert reads. A token that stays is copied once. The way back is alike. There are as many rows as tokens
that go, no more: their numbers are told first.

Each rank has two orders of rows. The *home* order, of the tokens that this rank has: by expert, over all experts of all
ranks. The *expert* order, of those that experts of this rank compute: by expert, and within an expert by the rank from
which they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from bagua.torch_api.comm.block_exchange import RowExchange, Rows
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.shared_rows import SharedRows, Span, Write
from bagua.torch_api.job.session import current
from bagua.torch_api.layers.gating import Choice

CACHED_BYTES = 1 << 18  # of rows on which several things are done one after the other
MOST_GUESSED = 1.5  # times the rows that this rank sends: how many it expects to get at most


@dataclass(frozen=True)
class Way:
    """Way from one order of rows into the other. ``gives[rank]``: this rank's spans that go there, one for each expert.
    ``takes[rank]``: where those that come from there begin here, and how many they are. ``lands[rank]``: where this
    rank's spans begin there. ``arrive``: how many rows come to each rank."""

    gives: list[list[Span]]
    takes: list[list[Span]]
    lands: list[list[int]]
    arrive: list[int]


@dataclass(frozen=True)
class Routes:
    """The ways of one forward pass. ``comm``: None where one process has all experts. ``shared``: None where ranks
    don't see each other's memory. ``there``: from the home order to the expert order; ``back``: the reverse.
    ``sizes``: rows of each expert of this rank.

    ``mean``: gradients of experts are divided by the number of ranks.
    """

    choice: Choice
    comm: Communicator | None
    shared: SharedRows | None
    there: Way
    back: Way
    sizes: list[int]
    mean: bool

    @classmethod
    def of(
        cls, choice: Choice, comm: Communicator | None, local_experts: int, mean: bool, like: torch.Tensor
    ) -> Routes:
        """Tells the other ranks how many tokens come: one small exchange. ``like``: the tokens."""
        mine: list[int] = choice.counts.tolist()
        shared = None
        if comm is None:
            counts = [mine]
        elif like.is_cpu and any(set(comm.ranks) <= set(host) for host in current().membership.hosts):
            shared = SharedRows(current(), comm)
            size = like.shape[1] * like.element_size()
            # Rows that come are guessed: if they are more, ``carry`` meets once more.
            counts = shared.meet(like.dtype, int(MOST_GUESSED * sum(mine)) * size, mine)
        else:
            every = choice.counts.new_empty(comm.nranks(), len(mine))
            comm.allgather(choice.counts, every)
            counts = every.tolist()
        me = 0 if comm is None else comm.rank()
        there, back, sizes = _ways(counts, local_experts, me)
        return cls(choice, comm, shared, there, back, sizes, mean)

    @property
    def rank(self) -> int:
        """The place of this process among those that have experts."""
        return 0 if self.comm is None else self.comm.rank()

    @property
    def scale(self) -> int:
        """Number by which gradients of experts are divided."""
        return 1 if self.comm is None or not self.mean else self.comm.nranks()


def _ways(counts: list[list[int]], local: int, me: int) -> tuple[Way, Way, list[int]]:
    """``counts[rank][expert]``: tokens of that rank for each of all experts. The ways there and back, and the rows of
    each of the ``local`` experts of this rank."""
    ranks = range(len(counts))
    home = [[0, *accumulate(row)] for row in counts]  # of each rank: where the rows for each expert begin
    orders = []  # of each rank: where the rows of its expert i from rank j begin, number i * ranks + j
    for rank in ranks:
        own = range(rank * local, rank * local + local)
        orders.append([0, *accumulate(counts[other][expert] for expert in own for other in ranks)])
    n, first = len(counts), me * local
    gives = [[(home[me][e], counts[me][e]) for e in range(rank * local, rank * local + local)] for rank in ranks]
    takes = [[(orders[me][i * n + rank], counts[rank][first + i]) for i in range(local)] for rank in ranks]
    there = Way(gives, takes, [orders[rank][me : n * local : n] for rank in ranks], [order[-1] for order in orders])
    back = Way(takes, gives, [home[rank][first : first + local] for rank in ranks], [row[-1] for row in home])
    return there, back, [sum(row[first + i] for row in counts) for i in range(local)]


def dispatch(tokens: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, ...]:
    """[tokens, width] -> for each expert of this rank [rows, width], in the expert order."""
    made: tuple[torch.Tensor, ...] = _Dispatch.apply(tokens, routes)  # type: ignore[no-untyped-call]
    return made


def combine(results: Sequence[torch.Tensor], routes: Routes) -> torch.Tensor:
    """The reverse: for each token the sum of its experts' results, multiplied by their weights. Zeros for a token that
    has no expert."""
    made: torch.Tensor = _Combine.apply(routes, routes.choice.weights, *results)  # type: ignore[no-untyped-call]
    return made


def _travel(routes: Routes, way: Way, like: torch.Tensor, write: Write) -> torch.Tensor:
    """Rows of one order arrive in the other one. ``write`` has those that leave. Their width, dtype and device are
    those of ``like``."""
    if routes.shared is None:
        return _through_daemon(routes, way, like, write)
    # How much comes back is known now: memory for it is offered with this meeting.
    returning = routes.back.arrive[routes.rank] * like.shape[1] * like.element_size() if way is routes.there else None
    return routes.shared.carry(way.gives, way.lands, way.arrive, like, write, returning)


def _through_daemon(routes: Routes, way: Way, like: torch.Tensor, write: Write) -> torch.Tensor:
    """The same where ranks don't see each other's memory, and where there is one rank."""
    gives, takes = way.gives, way.takes
    width = like.shape[1]
    exchange = None if routes.comm is None else RowExchange(current(), routes.comm, like, width)

    def room(blocks: list[list[Span]]) -> Rows:
        count = sum(size for some in blocks for _, size in some)
        return Rows(like.new_empty(count, width), (0, 0)) if exchange is None else exchange.rows(count)

    out, into = (None if exchange is None else room(gives)), room(takes)
    at = 0
    # Rows that stay are written to their place; the others go between them.
    for (begin, size), (target, _) in zip(gives[routes.rank], takes[routes.rank], strict=True):
        if out is not None and at < begin:
            write(at, begin, out.tensor[at:begin])
        write(begin, begin + size, into.tensor[target : target + size])
        at = begin + size
    if out is not None and exchange is not None:
        if at < len(out.tensor):
            write(at, len(out.tensor), out.tensor[at:])
        exchange.run(out, gives, into, takes)
    return into.tensor


def _rows_of(parts: Sequence[torch.Tensor]) -> Write:
    """Writes rows of ``parts``, which lie one after the other."""
    if len(parts) == 1:

        def write_one(begin: int, end: int, target: torch.Tensor) -> None:
            target.copy_(parts[0].narrow(0, begin, end - begin))

        return write_one
    sizes = [part.shape[0] for part in parts]

    def write(begin: int, end: int, target: torch.Tensor) -> None:
        at, done = 0, 0
        for part, size in zip(parts, sizes, strict=True):
            first, count = max(begin - at, 0), min(end - at, size) - max(begin - at, 0)
            if count > 0:
                target.narrow(0, done, count).copy_(part.narrow(0, first, count))
                done += count
            at += size

    return write


def _picked(source: torch.Tensor, numbers: torch.Tensor) -> Write:
    """Writes rows of ``source`` by their numbers."""

    def write(begin: int, end: int, target: torch.Tensor) -> None:
        # Writes into the target: no copy in between.
        torch.index_select(source, 0, numbers.narrow(0, begin, end - begin), out=target)

    return write


def _added(rows: torch.Tensor, choice: Choice, weights: torch.Tensor | None) -> torch.Tensor:
    """Sums the rows of each token in the home order, in one pass. ``weights``: of each row, in the order of
    ``choice.rows_of``."""
    if rows.shape[0] == 0:
        return rows.new_zeros(choice.first_row.shape[0], rows.shape[1])
    return F.embedding_bag(choice.rows_of, rows, choice.first_row, mode="sum", per_sample_weights=weights)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tokens: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, ...]:
        context.routes = routes
        arrived = _travel(routes, routes.there, tokens, _picked(tokens.detach(), routes.choice.tokens))
        parts = (arrived,) if len(routes.sizes) == 1 else torch.split(arrived, routes.sizes)
        return tuple(map(_own, parts))

    @staticmethod
    @once_differentiable  # the gradient of a gradient would have to travel, too
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        routes = context.routes
        arrived = _travel(routes, routes.back, gradients[0], _rows_of(gradients))
        scale = None if routes.scale == 1 else arrived.new_full((arrived.shape[0],), routes.scale)
        return _added(arrived, routes.choice, scale), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, routes: Routes, weights: torch.Tensor, *results: torch.Tensor) -> torch.Tensor:
        arrived = _travel(routes, routes.back, results[0], _rows_of([one.detach() for one in results]))
        context.routes = routes
        context.save_for_backward(arrived, weights)
        return _added(arrived, routes.choice, weights.to(arrived.dtype).index_select(0, routes.choice.rows_of))

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        routes, (results, weights) = context.routes, context.saved_tensors
        pick = _picked(gradient, routes.choice.tokens)
        of_weights = torch.empty_like(weights)
        scaled = (weights / routes.scale).to(gradient.dtype).unsqueeze(1)

        # So few that they stay in the cache for all that is done with them.
        some = max(16, CACHED_BYTES // max(1, gradient.shape[1] * gradient.element_size()))

        def write(begin: int, end: int, target: torch.Tensor) -> None:
            for at in range(begin, end, some):
                count = min(some, end - at)
                rows = target.narrow(0, at - begin, count)
                pick(at, at + count, rows)
                of_weights[at : at + count] = torch.linalg.vecdot(rows, results.narrow(0, at, count))
                rows.mul_(scaled.narrow(0, at, count))

        arrived = _travel(routes, routes.there, gradient, write)
        return None, of_weights, *torch.split(arrived, routes.sizes)


def _own(part: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that an expert may change in place: no view of another one, for autograd."""
    made = part.new_empty(0)
    made.set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
    return made
