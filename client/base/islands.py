"""Islands: so many ranks hold one copy of a sharded model together. Each job has islands of one size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bagua.base.errors import ConfigError

VARIABLE = "BAGUA_ISLAND_SIZE"

T = TypeVar("T")


def size_in(variables: Mapping[str, str]) -> int:
    """Returns the size that these variables of ranks tell; 1 where they tell none. Raises ConfigError for no size."""
    text = variables.get(VARIABLE, "").strip() or "1"
    if not (text.isdecimal() and len(text) < 9 and int(text) > 0):
        raise ConfigError(f"{VARIABLE} is {text!r}: an island has a whole number of ranks, from 1. [BG114]")
    return int(text)


def rank_name(rank: int, size: int) -> str:
    """``rank 3``, with islands ``rank 3 of island 1``."""
    return f"rank {rank}" + (f" of island {rank // size}" if size > 1 else "")


def count(ranks: int, size: int, noun: str = "rank") -> str:
    """``1 rank``, ``6 ranks``, with islands ``1 island (2 ranks)``. Singular if there are ``size`` ranks."""
    text = f"{ranks} {noun}" + ("" if ranks == 1 else "s")
    return text if size == 1 else f"{ranks // size} {'island' if ranks == size else 'islands'} ({text})"


def misfit(size: int, ranks: Sequence[int]) -> str:
    """Says why hosts with so many ``ranks`` each can't be divided into islands of this size; empty if they can."""
    world = sum(ranks)
    if world % size:
        return f"{world} ranks can't be divided into islands of {size}"
    runs = [(each, len(list(run))) for each, run in itertools.groupby(ranks) if each % size]  # of small hosts, in order
    if any(size % each or each * hosts % size for each, hosts in runs) or len({each for each, _ in runs}) > 1:
        return f"islands of {size} ranks neither fill hosts of {', '.join(map(str, ranks))} ranks nor fit into them"
    return ""


def check(size: int, *, nodes: int, ranks: int, elastic: bool, respawn: int) -> None:
    """Raises ConfigError if a job of ``ranks`` on each of ``nodes`` can't have islands of this size."""
    if words := misfit(size, [ranks] * nodes):
        raise ConfigError(f"{words}: choose another --island-size or --nproc-per-node. [BG114]")
    if 0 < respawn < size:
        raise ConfigError(f"respawn is {respawn}, and an island has {size} ranks: give as many, or 0. [BG114]")
    if elastic and ranks % size:
        raise ConfigError(
            f"A node has {ranks} ranks: in an elastic job each island lies on one node, so they must be a multiple of "
            f"the island's size, {size}. [BG114]"
        )


def divide(members: Sequence[T], size: int, ended: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Returns (members that go on, those that are out). ``members``: of a host, in the order of their ranks. Of an
    island all are out when one has ``ended``."""
    staying: list[T] = []
    out: list[T] = []
    for begin in range(0, len(members), size):
        island = members[begin : begin + size]
        (out if any(map(ended, island)) else staying).extend(island)
    return staying, out
