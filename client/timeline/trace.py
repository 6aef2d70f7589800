"""A trace as a value: spans by source, each on the clock of its own machine, and what is known of the clocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bagua.base.islands import rank_name

ENGINE = -1  # ``Source.rank`` of the engine of a host


@dataclass(frozen=True)
class Span:
    """Something that took from ``begin`` to ``end``, in ns.

    ``number`` of a rank: of the step, by forward passes in training. Of an engine: of the operation in its communicator
    ``comm``. ``peer``: who was waited for, or is at the other end; -1: nobody. ``comm`` of a rank: 1 on another thread
    than the one that trains.
    """

    phase: str
    name: str
    begin: int
    end: int
    number: int = 0
    comm: int = 0
    peer: int = -1
    bytes: int = 0


@dataclass
class Source:
    """Spans that one rank, or the engine of one host (``rank`` is ENGINE), recorded. ``hosts``: node ids by the index
    that ``peer`` has in spans of engines. ``missing``: words, if not all that was asked for has come."""

    node: str
    rank: int
    hostname: str = ""
    member: int = 0
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    missing: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clock:
    """Clock of one node: ``offset`` ns are added to its times, which is wrong by ``bound`` ns at most. ``missing``:
    words, if it is not known.
    """

    offset: int = 0
    bound: int = 0
    missing: str = ""


@dataclass
class Trace:
    """Trace of one job, whose islands have ``island_size`` ranks. ``clocks`` by node."""

    job_id: str
    steps: int
    sources: list[Source] = field(default_factory=list)
    clocks: dict[str, Clock] = field(default_factory=dict)
    island_size: int = 1

    def add(self, part: Source) -> None:
        """Takes in a part; parts of one source become one."""
        for source in self.sources:
            # Another process may have had this number in an elastic job.
            if (source.node, source.rank, source.member) == (part.node, part.rank, part.member):
                source.spans += part.spans
                source.dropped += part.dropped
                source.missing = " ".join(filter(None, (source.missing, part.missing)))
                source.hosts = source.hosts or part.hosts
                return
        self.sources.append(part)

    @property
    def empty(self) -> bool:
        return not any(source.spans for source in self.sources)

    def missing(self) -> list[str]:
        """Lists in words what has not come, and why."""
        sources = in_order(self.sources)
        found = [source.missing for source in sources if source.missing]
        found += [
            f"{source_name(one, self.island_size)} had no room for {one.dropped} spans"
            for one in sources
            if one.dropped
        ]
        return found + [clock.missing for clock in self.clocks.values() if clock.missing]

    def bounds(self) -> Mapping[str, int]:
        """Returns by node, in ns, how far its times may be wrong in comparison with the coordinator's clock."""
        return {node: clock.bound for node, clock in self.clocks.items()}


def in_order(sources: Iterable[Source]) -> list[Source]:
    """Hosts in the order of their lowest rank; of each host its engine first."""
    found = list(sources)
    first = {source.node: 1 << 30 for source in found}  # hosts without a rank come last
    for source in found:
        if source.rank != ENGINE:
            first[source.node] = min(first[source.node], source.rank)
    return sorted(found, key=lambda source: (first[source.node], source.node, source.rank))


def source_name(source: Source, island_size: int) -> str:
    return f"host {source.node}" if source.rank == ENGINE else rank_name(source.rank, island_size)
