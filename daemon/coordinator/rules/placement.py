"""Chooses the nodes of a job, by pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagua.daemon.coordinator.rules.domain import HostRecord, JobSpec, NodeView, RankRecord

_SHOWN = 10  # names and figures in one sentence


def place(spec: JobSpec, nodes: Iterable[NodeView]) -> tuple[NodeView, ...] | str:
    """Chooses the nodes of a job in ring order: the first ``spec.nnodes`` open ones of one wire version, by node_id,
    that have enough free slots; an elastic job may begin on fewer, as its ``least_nodes`` say. Else says what is
    missing."""
    connected = sorted((node for node in nodes if node.open), key=lambda node: node.node_id)
    fit = [node for node in connected if node.free >= spec.nproc_per_node]
    alike = _alike(fit, spec.nnodes)
    if len(alike) >= spec.least_nodes:
        return tuple(alike[: spec.nnodes])
    slots = "1 free slot" if spec.nproc_per_node == 1 else f"{spec.nproc_per_node} free slots"
    wanted = f"1 node with {slots}" if spec.least_nodes == 1 else f"{spec.least_nodes} nodes with {slots} each"
    words = f"needs {wanted}; connected: {_figures(connected)}"
    if len(fit) < spec.least_nodes:
        return words
    return f"{words}. They can't work on one job: {releases(fit)}. Upgrade the older ones"


def keep(spec: JobSpec, nodes: Iterable[NodeView]) -> frozenset[str]:
    """Chooses nodes on which nothing else is to begin until a job fits there: those with the most free slots. Empty
    where it would not fit even if all were free."""
    fit = _alike((node for node in nodes if node.open and node.slots >= spec.nproc_per_node), spec.least_nodes)
    if len(fit) < spec.least_nodes:
        return frozenset()
    return frozenset(node.node_id for node in sorted(fit, key=lambda one: (-one.free, one.node_id))[: spec.least_nodes])


def _alike(nodes: Iterable[NodeView], enough: int) -> Sequence[NodeView]:
    """Returns the largest group of ``nodes`` that can talk with each other. Groups of at least ``enough`` count as
    equal; of equal ones the newest release."""
    found = _by_wire_version(nodes)
    return max(found.values(), key=lambda some: (min(len(some), enough), some[0].wire_version), default=())


def releases(nodes: Iterable[NodeView]) -> str:
    """``a, b: bagua 1.0.0 (wire version 16); c: bagua 1.1.0 (wire version 17)``."""
    found = sorted(_by_wire_version(nodes).items())
    return "; ".join(
        f"{names([node.node_id for node in some])}: bagua {some[0].version or 'unknown'} (wire version {number})"
        for number, some in found
    )


def _by_wire_version(nodes: Iterable[NodeView]) -> dict[int, list[NodeView]]:
    found: dict[int, list[NodeView]] = {}
    for node in nodes:
        found.setdefault(node.wire_version, []).append(node)
    return found


def hosts_with_ranks(spec: JobSpec, nodes: Iterable[NodeView]) -> tuple[HostRecord, ...]:
    """Host i has the ranks [i * nproc, (i + 1) * nproc)."""
    per_node = spec.nproc_per_node
    return tuple(
        node.host(index, [RankRecord(index * per_node + local, local, node.node_id) for local in range(per_node)])
        for index, node in enumerate(nodes)
    )


def names(found: Sequence[str]) -> str:
    """``a, b and 3 more``."""
    if len(found) <= _SHOWN:
        return ", ".join(found)
    return f"{', '.join(found[:_SHOWN])} and {len(found) - _SHOWN} more"


def _figures(connected: Sequence[NodeView]) -> str:
    if not connected:
        return "none"
    return names([f"{node.node_id} ({node.free} of {node.slots} free)" for node in connected])
