"""The kinds of faults, and their order: a pure function of the seed and of who is left."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bagua.base.errors import ConfigError

ALONE = 0.7  # so likely a fault is over, with all its consequences, before the next one comes


Need = Literal["root", "sqlite", "postgresql"]


@dataclass(frozen=True)
class Kind:
    """``group``: of similar kinds. ``takes``: members that are lost by it, or leave. ``lasts_s``: for so long.
    ``halts``: nobody trains meanwhile, so that a pause is counted from its end. ``phase``: of newcomers that meet it,
    "prepares" or "takes" (the state over); a rank is lost first, to have some. ``needs``: what must be there."""

    group: str
    words: str
    takes: Literal["", "rank", "node"] = ""
    lasts_s: float = 0.0
    halts: bool = False
    phase: str = ""
    needs: Need | None = None
    hosts: int = 1


KINDS = {
    "kill-rank": Kind("ranks", "SIGKILL of a rank", takes="rank"),
    "stop-rank": Kind("ranks", "SIGSTOP of a rank for 1 s", lasts_s=1.0, halts=True),
    "silent-rank": Kind("silence, 5 s", "SIGSTOP of a rank until it is out", takes="rank"),
    "kill-daemon": Kind("daemons", "SIGKILL of a daemon, which its keeper starts again"),
    "stop-daemon": Kind("daemons", "SIGSTOP of a daemon for 1.5 s", lasts_s=1.5, halts=True),
    "silent-daemon": Kind("silence, 5 s", "SIGSTOP of a daemon until it is out", takes="node", hosts=2),
    "kill-keeper": Kind("daemons", "SIGKILL of a keeper: its daemon and ranks die with it", takes="node"),
    "stop-keeper": Kind("daemons", "SIGSTOP of a keeper for 3 s", lasts_s=3.0),
    "kill-newcomer": Kind("newcomers", "SIGKILL of a newcomer while it prepares", takes="rank", phase="prepares"),
    "stop-newcomer": Kind(
        "newcomers", "SIGSTOP of a newcomer for 2 s as it prepares", takes="rank", lasts_s=2.0, phase="prepares"
    ),
    "kill-taker": Kind("newcomers", "SIGKILL of a newcomer while it takes over the state", takes="rank", phase="takes"),
    "silent-taker": Kind(
        "silence, 5 s", "SIGSTOP of a newcomer while it takes over the state", takes="rank", phase="takes"
    ),
    "scale": Kind("planned changes", "bagua job scale to one node less, then back", takes="node", hosts=2),
    "drain": Kind("planned changes", "bagua node drain, then undrain", takes="node", hosts=2),
    "pause": Kind("planned changes", "bagua job pause, and resume after 1 s", lasts_s=1.0, halts=True),
    "kill-coordinator": Kind(
        "coordinator, database", "SIGKILL of the coordinator, started again after 1 s", lasts_s=1.0
    ),
    "stop-coordinator": Kind("coordinator, database", "SIGSTOP of the coordinator for 3 s", lasts_s=3.0),
    "kill-leader": Kind(
        "coordinator, database",
        "SIGKILL of the one that leads: the second one does",
        lasts_s=1.0,
        needs="postgresql",
    ),
    "stop-leader": Kind(
        "coordinator, database", "SIGSTOP of the one that leads, for 8 s", lasts_s=8.0, needs="postgresql"
    ),
    "lock-database": Kind("coordinator, database", "the database locked for 4 s", lasts_s=4.0, needs="sqlite"),
    "kill-database": Kind(
        "coordinator, database", "SIGKILL of PostgreSQL, started again after 2 s", lasts_s=2.0, needs="postgresql"
    ),
    "stop-database": Kind("coordinator, database", "SIGSTOP of PostgreSQL for 4 s", lasts_s=4.0, needs="postgresql"),
    "cut-link": Kind("network, disk", "connections between two hosts cut", hosts=2),
    "dead-link": Kind("silence, 5 s", "a host's connections carry nothing more", hosts=2),
    "slow-link": Kind("network, disk", "a host sends at 100 kB/s for 2 s", lasts_s=2.0, hosts=2),
    "delay-link": Kind("network, disk", "a host's messages wait for up to 50 ms, for 2 s", lasts_s=2.0, hosts=2),
    "corrupt-link": Kind("network, disk", "garbage in a connection between hosts", hosts=2),
    "full-disk": Kind("network, disk", "no room on the disk of all services for 3 s", lasts_s=3.0, needs="root"),
}
WHY_NOT = {
    "root": "it needs root",
    "sqlite": "it needs SQLite: leave --postgresql out",
    "postgresql": "it needs --postgresql",
}


JOIN = "join"  # not a fault, but shown like one: those that were lost are replaced


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


def choose(names: str, there: Collection[Need]) -> tuple[list[str], dict[str, str]]:
    """Returns (kinds of ``names``, with commas, empty for all; those that can't be played here, and why). ``there``:
    all that kinds may need. Raises ConfigError for unknown names.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(KINDS)
    for name in wanted:
        if name not in KINDS:
            raise ConfigError(f"There is no fault {name!r}: choose from {', '.join(KINDS)}. [BG003]")
    needs = {name: KINDS[name].needs for name in wanted}
    left_out = {name: WHY_NOT[need] for name, need in needs.items() if need is not None and need not in there}
    chosen = [name for name in wanted if name not in left_out]
    if not chosen:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"No fault is left to play ({reasons}). [BG003]")
    return chosen, left_out
