"""The kinds of faults, and their order: a pure function of the seed and of who is left."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bagua.base.errors import ConfigError

ALONE = 0.7
"""So likely a fault is over, with all its consequences, before the next one comes."""


@dataclass(frozen=True)
class Kind:
    """``takes``: members that are lost by it. ``lasts_s``: for so long. ``halts``: nobody trains meanwhile, so that a
    pause is counted from its end. ``root``: whether it needs root."""

    words: str
    takes: Literal["", "rank", "node"] = ""
    lasts_s: float = 0.0
    halts: bool = False
    root: bool = False
    hosts: int = 1


KINDS = {
    "kill-rank": Kind("SIGKILL of a rank", takes="rank"),
    "stop-rank": Kind("SIGSTOP of a rank for 1 s", lasts_s=1.0, halts=True),
    "kill-daemon": Kind("SIGKILL of a daemon, which its keeper starts again"),
    "kill-keeper": Kind("SIGKILL of a keeper: its daemon and ranks die with it", takes="node"),
    "stop-daemon": Kind("SIGSTOP of a daemon for 1.5 s", lasts_s=1.5, halts=True),
    "silent-rank": Kind("SIGSTOP of a rank until it is out", takes="rank"),
    "silent-daemon": Kind("SIGSTOP of a daemon until it is out", takes="node", hosts=2),
    "kill-coordinator": Kind("SIGKILL of the coordinator, started again after 1 s", lasts_s=1.0),
    "stop-coordinator": Kind("SIGSTOP of the coordinator for 3 s", lasts_s=3.0),
    "lock-database": Kind("the database locked for 4 s", lasts_s=4.0),
    "cut-link": Kind("connections between two hosts cut", hosts=2),
    "slow-link": Kind("a host sends at 100 kB/s for 2 s", lasts_s=2.0, hosts=2),
    "corrupt-link": Kind("garbage in a connection between hosts", hosts=2),
    "full-disk": Kind("no room on the disk of all services for 3 s", lasts_s=3.0, root=True),
}


JOIN = "join"
"""Not a fault, but shown like one: those that were lost are replaced."""


@dataclass(frozen=True)
class Fault:
    """``node`` and ``rank``: which of the nodes, and which of its ranks, in the order of the job. ``alone``: the next
    one waits until all that are lost were replaced; else it may come while they join."""

    kind: str
    node: int
    rank: int
    alone: bool


class Plan:
    """Faults one after the other: each kind once, in a random order, then each once again."""

    def __init__(self, seed: int, kinds: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._kinds = tuple(kinds)
        self._bag: list[str] = []

    def next(self, ranks: Mapping[str, int]) -> Fault | None:
        """The next fault in a job that has so many ``ranks`` on its nodes. None: too few are left for those that come
        next. One node with a rank stays."""
        if not self._bag:
            self._bag = self._random.sample(self._kinds, len(self._kinds))
        sizes = tuple(ranks.values())
        possible = next((kind for kind in self._bag if _possible(KINDS[kind], sizes)), None)
        if possible is None:
            return None
        self._bag.remove(possible)
        node = self._random.randrange(len(sizes))
        return Fault(possible, node, self._random.randrange(sizes[node]), self._random.random() < ALONE)


def _possible(kind: Kind, sizes: Sequence[int]) -> bool:
    left = {"": sum(sizes), "rank": sum(sizes) - 1, "node": len(sizes) - 1}[kind.takes]
    return left > 0 and len(sizes) >= kind.hosts


def choose(names: str, root: bool) -> tuple[list[str], dict[str, str]]:
    """(kinds of ``names``, with commas, empty for all; those that can't be played here, and why). Raises ConfigError
    for unknown names."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(KINDS)
    for name in wanted:
        if name not in KINDS:
            raise ConfigError(f"There is no fault {name!r}: choose from {', '.join(KINDS)}.")
    left_out = {name: "it needs root" for name in wanted if KINDS[name].root and not root}
    chosen = [name for name in wanted if name not in left_out]
    if not chosen:
        raise ConfigError(f"No fault is left to play: {', '.join(left_out)} needs root.")
    return chosen, left_out
