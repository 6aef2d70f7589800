"""Chooses the nodes of a job, by pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagua.daemon.coordinator.rules.domain import HostRecord, JobSpec, NodeView, RankRecord

_SHOWN = 10  # names and figures in one sentence


def place(spec: JobSpec, nodes: Iterable[NodeView]) -> tuple[NodeView, ...] | str:
    """Chooses the nodes of a job in ring order: the first ``spec.nnodes`` open ones, by node_id, that have enough free
    slots; an elastic job may begin on fewer, as its ``least_nodes`` say. Else says what is missing."""
    connected = sorted((node for node in nodes if node.open), key=lambda node: node.node_id)
    fit = [node for node in connected if node.free >= spec.nproc_per_node]
    if len(fit) >= spec.least_nodes:
        return tuple(fit[: spec.nnodes])
    slots = "1 free slot" if spec.nproc_per_node == 1 else f"{spec.nproc_per_node} free slots"
    wanted = f"1 node with {slots}" if spec.least_nodes == 1 else f"{spec.least_nodes} nodes with {slots} each"
    return f"needs {wanted}; connected: {_figures(connected)}"


def keep(spec: JobSpec, nodes: Iterable[NodeView]) -> frozenset[str]:
    """Chooses nodes on which nothing else is to begin until a job fits there: those with the most free slots. Empty
    where it would not fit even if all were free."""
    fit = [node for node in nodes if node.open and node.slots >= spec.nproc_per_node]
    if len(fit) < spec.least_nodes:
        return frozenset()
    return frozenset(node.node_id for node in sorted(fit, key=lambda one: (-one.free, one.node_id))[: spec.least_nodes])


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
