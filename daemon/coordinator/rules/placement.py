"""Chooses the nodes of a job, by pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagua.daemon.coordinator.rules.domain import HostRecord, JobSpec, NodeView, RankRecord

_SHOWN = 10  # names and figures in one sentence


@dataclass(frozen=True)
class Placement:
    """The nodes of a generation, in ring order."""

    nodes: tuple[NodeView, ...]

    @property
    def node_ids(self) -> list[str]:
        """Ids of the nodes in ring order."""
        return [node.node_id for node in self.nodes]


def place(spec: JobSpec, nodes: Iterable[NodeView]) -> Placement | str:
    """The first ``spec.nnodes`` open nodes, by node_id, that have enough free slots; an elastic job may begin on fewer,
    as its ``least_nodes`` say. Else what is missing."""
    connected = sorted((node for node in nodes if node.open), key=lambda node: node.node_id)
    fit = [node for node in connected if node.free >= spec.nproc_per_node]
    if len(fit) >= spec.least_nodes:
        return Placement(tuple(fit[: spec.nnodes]))
    slots = "1 free slot" if spec.nproc_per_node == 1 else f"{spec.nproc_per_node} free slots"
    wanted = f"1 node with {slots}" if spec.least_nodes == 1 else f"{spec.least_nodes} nodes with {slots} each"
    return f"needs {wanted}; connected: {_figures(connected)}"


def hosts_with_ranks(spec: JobSpec, placement: Placement) -> tuple[HostRecord, ...]:
    """Host i has the ranks [i * nproc, (i + 1) * nproc)."""
    per_node = spec.nproc_per_node
    return tuple(
        HostRecord(
            index,
            node.node_id,
            node.hostname,
            node.address,
            node.boot_id,
            index * per_node,
            per_node,
            ranks=tuple(RankRecord(index * per_node + local, local, node.node_id) for local in range(per_node)),
        )
        for index, node in enumerate(placement.nodes)
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
