"""The kinds of faults, and their order: a pure function of the seed and of who is left."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bagua.base.errors import ConfigError
from bagua.chaos.firewall import Side

ALONE = 0.7  # so likely a fault is over, with all its consequences, before the next one comes


Need = Literal["root", "firewall", "sqlite", "postgresql"]

SILENT_S = 5.0  # a rank, or a host, that is silent for so long is out; so is a daemon that is away
FENCE_AFTER_S = 30.0  # so are ranks of a node that does not hear the coordinator, where chaos is played
SERVICES = "coordinator, database"  # a group of kinds
REFUSALS = ("EACCES", "EPERM", "EINVAL", "ENETDOWN", "EADDRNOTAVAIL", "ENETUNREACH", "EHOSTUNREACH")


@dataclass(frozen=True)
class Rule:
    """Rule of a host's firewall, which lets it speak with the coordinator. ``lost``: packets that get lost, "in" or
    "out" of the host; ``refused``: the error of its connect(), instead. ``pair``: with one other host alone. ``times``:
    so often, for ``lasts_s`` of the kind; 0: once, until those that are left go on."""

    lost: tuple[Side, ...] = ("in", "out")
    refused: str = ""
    pair: bool = False
    times: int = 0


@dataclass(frozen=True)
class Kind:
    """``group``: of similar kinds. ``takes``: members that are lost by it, or leave; "some": the coordinator decides.
    ``lasts_s``: for so long. ``harmless_s``: if it is not over by then, since the machine is slow, it takes some, too.
    ``halts``: nobody trains meanwhile, so that a pause is counted from its end. ``phase``: of newcomers that meet it,
    "prepares" or "takes" (the state over); a rank is lost first, to have some. ``needs``: what must be there."""

    group: str
    words: str
    takes: Literal["", "rank", "node", "some"] = ""
    lasts_s: float = 0.0
    # Nodes count from their last answer, which on a slow machine is many seconds older than the fault.
    harmless_s: float = FENCE_AFTER_S / 2
    halts: bool = False
    phase: str = ""
    needs: Need | None = None
    hosts: int = 1
    rule: Rule | None = None


def _broken_path(words: str, rule: Rule, hosts: int = 2, lasts_s: float = 0.0) -> Kind:
    """The data of a host, while all reach the coordinator."""
    return Kind("data path", words, takes="some", lasts_s=lasts_s, needs="firewall", hosts=hosts, rule=rule)


KINDS = {
    "kill-rank": Kind("ranks", "SIGKILL of a rank", takes="rank"),
    "stop-rank": Kind("ranks", "SIGSTOP of a rank for 1 s", lasts_s=1.0, harmless_s=SILENT_S, halts=True),
    "silent-rank": Kind("silence, 5 s", "SIGSTOP of a rank until it is out", takes="rank"),
    "kill-daemon": Kind("daemons", "SIGKILL of a daemon, which its keeper starts again", harmless_s=SILENT_S, hosts=2),
    "stop-daemon": Kind("daemons", "SIGSTOP of a daemon for 1.5 s", lasts_s=1.5, harmless_s=SILENT_S, halts=True),
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
    "upgrade": Kind(
        "planned changes",
        "bagua node upgrade: an installed daemon takes over from one that runs",
        harmless_s=SILENT_S,
        hosts=2,
    ),
    "other-release": Kind(
        "planned changes", "a node comes back with a release that can't talk with the others", takes="node", hosts=2
    ),
    "pause": Kind("planned changes", "bagua job pause, and resume after 1 s", lasts_s=1.0, halts=True),
    "kill-coordinator": Kind(SERVICES, "SIGKILL of the coordinator, started again after 1 s", lasts_s=1.0),
    "stop-coordinator": Kind(SERVICES, "SIGSTOP of the coordinator for 3 s", lasts_s=3.0),
    "kill-leader": Kind(
        SERVICES, "SIGKILL of the one that leads: the second one does", lasts_s=1.0, needs="postgresql"
    ),
    "stop-leader": Kind(SERVICES, "SIGSTOP of the one that leads, for 8 s", lasts_s=8.0, needs="postgresql"),
    "lock-database": Kind(SERVICES, "the database locked for 4 s", lasts_s=4.0, needs="sqlite"),
    "kill-database": Kind(SERVICES, "SIGKILL of PostgreSQL, started again after 2 s", lasts_s=2.0, needs="postgresql"),
    "stop-database": Kind(SERVICES, "SIGSTOP of PostgreSQL for 4 s", lasts_s=4.0, needs="postgresql"),
    "cut-link": Kind("network, disk", "connections between two hosts cut", hosts=2),
    "dead-link": Kind("silence, 5 s", "a host's connections carry nothing more", hosts=2),
    "slow-link": Kind("network, disk", "a host sends at 100 kB/s for 2 s", lasts_s=2.0, hosts=2),
    "delay-link": Kind("network, disk", "a host's messages wait for up to 50 ms, for 2 s", lasts_s=2.0, hosts=2),
    "corrupt-link": Kind("network, disk", "garbage in a connection between hosts", hosts=2),
    "full-disk": Kind("network, disk", "no room on the disk of all services for 3 s", lasts_s=3.0, needs="root"),
    "read-only": Kind("network, disk", "the folder of all services is read-only for 3 s", lasts_s=3.0, needs="root"),
    "deep-tree": Kind(
        "daemons", "3,000 nested folders among a daemon's files, and its SIGKILL", harmless_s=SILENT_S, hosts=2
    ),
    "kill-starting-keeper": Kind("daemons", "SIGKILL of a new keeper while its daemon starts"),
    "sleep": Kind("sleep", "SIGSTOP of all processes for 20 s", lasts_s=20.0, harmless_s=math.inf, halts=True),
    "cut-host": _broken_path("nothing passes between a host and the others", Rule()),
    "deaf-host": _broken_path("nothing arrives at a host", Rule(("in",))),
    "mute-host": _broken_path("nothing that a host sends arrives", Rule(("out",))),
    "cut-pair": _broken_path("nothing passes between two of three hosts", Rule(pair=True), hosts=3),
    "half-pair": _broken_path("nothing arrives from one of the others", Rule(("in",), pair=True), hosts=3),
    "flapping-host": _broken_path("a host is cut off for 6 s, seven times", Rule(times=7), lasts_s=6.0),
    **{
        f"refuse-{name.lower()}": _broken_path(
            f"a host's connections are cut, its connect() fails: {name}", Rule(refused=name)
        )
        for name in REFUSALS
    },
}
WHY_NOT = {
    "root": "it needs root",
    "firewall": "it needs root, and a kernel that runs BPF programs for a control group (cgroup2, Linux 5.18)",
    "sqlite": "it needs SQLite: leave --postgresql out",
    "postgresql": "it needs --postgresql",
}


JOIN = "join"  # not a fault, but shown like one: those that were lost are replaced


@dataclass(frozen=True)
class Fault:
    """``node`` and ``rank``: which of the nodes, and which of its ranks, in the order of the job. ``alone``: the next
    one waits until all that are lost were replaced; else it may come while they join. ``chance``: from 0 to 1, for a
    moment."""

    kind: str
    node: int
    rank: int
    alone: bool
    chance: float


class Plan:
    """Faults one after the other: each kind once, in a random order, then each once again."""

    def __init__(self, seed: int, kinds: Sequence[str], island_size: int = 1) -> None:
        self._island_size = island_size
        self._random = random.Random(seed)
        self._kinds = tuple(kinds)
        self._bag: list[str] = []

    def next(self, ranks: Mapping[str, int]) -> Fault | None:
        """The next fault in a job that has so many ``ranks`` on its nodes. None: too few are left for those that come
        next. One node with a rank stays."""
        if not self._bag:
            self._bag = self._random.sample(self._kinds, len(self._kinds))
        sizes = tuple(ranks.values())
        possible = next((kind for kind in self._bag if self._possible(KINDS[kind], sizes)), None)
        if possible is None:
            return None
        self._bag.remove(possible)
        node = self._random.randrange(len(sizes))
        rank, alone = self._random.randrange(sizes[node]), self._random.random() < ALONE
        return Fault(possible, node, rank, alone, self._random.random())

    def _possible(self, kind: Kind, sizes: Sequence[int]) -> bool:
        left = {"": sum(sizes), "rank": sum(sizes) - self._island_size}.get(kind.takes, len(sizes) - 1)
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
