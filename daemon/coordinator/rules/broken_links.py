"""Decides who leaves an elastic job whose hosts can't all talk with each other: pure functions.

Hosts are the vertices of a graph, and an edge joins two of which one accuses the other. Hosts that cover all edges are
put out; the others go on. The fewest are wanted (a minimum vertex cover); between equals the rest with more ranks, then
the one with more hosts that hold the job's state, then the one with the first hosts, as rank 0 most often writes
checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from bagua.daemon.coordinator.rules.domain import HostRecord

Pair = tuple[str, str]
Graph = Mapping[int, frozenset[int]]  # place of a host -> those with which it shares an edge
_LARGEST = 64  # hosts that share broken links: of more, and after so many branches, a good cover is looked for
_BRANCHES = 4_096


def pairs_between(pairs: Iterable[Pair], nodes: Iterable[str]) -> tuple[Pair, ...]:
    """Returns the pairs of two of these nodes, each once and in order."""
    there = set(nodes)
    return tuple(sorted({(min(pair), max(pair)) for pair in pairs if there.issuperset(pair) and pair[0] != pair[1]}))


def put_out(hosts: Sequence[HostRecord], pairs: Iterable[Pair]) -> tuple[str, ...]:
    """Returns the nodes that leave, so that no pair is left: never all, and never all that hold the state."""
    places = {host.node_id: place for place, host in enumerate(hosts)}
    edges = defaultdict[int, set[int]](set)
    for one, other in pairs_between(pairs, places):
        edges[places[one]].add(places[other])
        edges[places[other]].add(places[one])
    graph = {place: frozenset(others) for place, others in sorted(edges.items())}
    found = _cover(hosts, graph)
    holders = {place for place, host in enumerate(hosts) if not host.new}
    if holders and holders <= found:  # one of them stays, and who can't talk with it leaves
        found = min(
            (graph[one] | _cover(hosts, _without(graph, graph[one] | {one})) for one in sorted(holders)),
            key=lambda out: _price(hosts, out),
        )
    return tuple(hosts[place].node_id for place in sorted(found))


def _price(hosts: Sequence[HostRecord], out: frozenset[int]) -> tuple[object, ...]:
    ranks = sum(hosts[place].nranks for place in out)
    holders = sum(not hosts[place].new for place in out)
    return len(out), ranks, holders, tuple(place in out for place in range(len(hosts)))


def _without(graph: Graph, gone: frozenset[int]) -> dict[int, frozenset[int]]:
    left = {place: others - gone for place, others in graph.items() if place not in gone}
    return {place: others for place, others in left.items() if others}


def _cover(hosts: Sequence[HostRecord], graph: Graph) -> frozenset[int]:
    """The parts of a graph that share no edge have nothing to do with each other."""
    found: frozenset[int] = frozenset()
    while graph:
        part, reached = frozenset[int](), frozenset({min(graph)})
        while reached != part:
            part, reached = reached, reached.union(*(graph[place] for place in reached))
        found |= _cover_part(hosts, {place: graph[place] for place in part})
        graph = _without(graph, part)
    return found


def _cover_part(hosts: Sequence[HostRecord], graph: Graph) -> frozenset[int]:
    best = _greedy(hosts, graph)
    if len(graph) > _LARGEST:
        return best
    branches = [(graph, frozenset[int]())]
    for _ in range(_BRANCHES):
        if not branches:
            break
        left, out = branches.pop()
        if not left:
            best = min(best, out, key=lambda one: _price(hosts, one))
        elif len(out) + _matching(left) <= len(best):
            place = max(left, key=lambda one: (len(left[one]), one))  # it leaves, or all that it can't talk with
            branches.append((_without(left, left[place]), out | left[place]))
            branches.append((_without(left, frozenset({place})), out | {place}))
    return best


def _matching(graph: Graph) -> int:
    """The number of edges of which no two share a host: each of them costs one."""
    taken: set[int] = set()
    for place, others in sorted(graph.items()):
        free = min(others - taken, default=None)
        if free is not None and place not in taken:
            taken |= {place, free}
    return len(taken) // 2


def _greedy(hosts: Sequence[HostRecord], graph: Graph) -> frozenset[int]:
    """Takes out the host with most edges until no edge is left, then puts back hosts that need not have gone."""
    edges, out = {place: len(others) for place, others in graph.items()}, set[int]()
    while any(edges.values()):
        most = max(edges, key=lambda place: (edges[place], -hosts[place].nranks, hosts[place].new, place))
        del edges[most]
        out.add(most)
        for other in graph[most] & edges.keys():
            edges[other] -= 1
    for place in sorted(out):
        if graph[place] <= out:
            out.remove(place)
    return frozenset(out)
