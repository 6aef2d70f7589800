"""Queries of nodes and of coordinators, for ``store.Transaction``.

Whoever locks rows of several nodes or jobs does it in the order of their ids, nodes before jobs: then no two
transactions wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache

import sqlalchemy as sa

from bagua.daemon.coordinator.rules.domain import CoordinatorRecord, NodeRecord, Phase
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.queries import Among, UseQueries, insert_into

_KEPT = ("node_id", "draining")  # when a node introduces itself again: the wish that it drains stays


class NodeQueries(UseQueries):
    """The part of a transaction that is about nodes, and about coordinators."""

    # ---- coordinators

    def beat(self, owner: str, clock: float) -> None:
        """Notes that ``owner`` lives."""
        self._later(_put_beat(self._db.dialect.name), {"owner": owner, "clock": clock})

    def announce(self, own: CoordinatorRecord) -> None:
        """Notes where a coordinator is that has given a beat, and since when."""
        told = {"address": own.address, "machine": own.machine, "arrived_clock": own.arrived_clock}
        self._later(sa.update(m.coordinators).where(m.coordinators.c.owner == own.owner).values(told))

    def coordinators(self) -> list[CoordinatorRecord]:
        """Lists all coordinators that ever gave a beat."""
        return [CoordinatorRecord(**row) for row in self._db.execute(sa.select(m.coordinators)).mappings()]

    # ---- nodes

    def put_nodes(self, nodes: Sequence[NodeRecord]) -> None:
        """Inserts or replaces, but for the wish that they drain."""
        statement = _put_node(self._db.dialect.name)
        self._later(statement, [{field.name: getattr(node, field.name) for field in fields(node)} for node in nodes])

    def node(self, node_id: str) -> NodeRecord | None:
        """Returns one node, or None."""
        row = self._db.execute(sa.select(m.nodes).where(m.nodes.c.node_id == node_id)).mappings().one_or_none()
        return None if row is None else NodeRecord(**row)

    def nodes(self) -> list[NodeRecord]:
        """Returns all nodes, sorted by id."""
        return [
            NodeRecord(**row) for row in self._db.execute(sa.select(m.nodes).order_by(m.nodes.c.node_id)).mappings()
        ]

    def lock_nodes(self, node_ids: Iterable[str]) -> dict[str, NodeRecord]:
        """Returns those of the nodes that exist. Until the end of the transaction nobody else changes them, or takes
        slots of them.
        """
        return {row.node_id: NodeRecord(**row._mapping) for row in self._among(_LOCKED_NODES, node_ids)}

    def mark_node(self, node_id: str, draining: bool | None, leaving: bool | None) -> None:
        """Marks a node as draining or not: as a user has asked (``draining``), as its daemon says (``leaving``). None:
        as it was.
        """
        marks = {name: mark for name, mark in (("draining", draining), ("leaving", leaving)) if mark is not None}
        if marks:
            self._later(sa.update(m.nodes).where(m.nodes.c.node_id == node_id).values(marks))

    def disconnect_nodes(self, node_ids: Sequence[str], owner: str, last_seen: float) -> None:
        """Marks that ``owner`` holds no session of the nodes, whichever runs of their daemons were written down last:
        the ends of several may have waited for the database together."""
        c = m.nodes.c
        statement = sa.update(m.nodes).where(c.node_id == sa.bindparam("p_node_id"), c.owner == owner)
        rows = [{"p_node_id": node_id} for node_id in node_ids]
        self._later(statement.values(owner=None, last_seen=last_seen), rows)

    def disconnect_all(self, owner: str) -> list[str]:
        """Marks that ``owner`` holds no session; returns the nodes whose sessions it held. ``last_seen`` stays: nobody
        has seen them end."""
        c = m.nodes.c
        held = self._db.execute(sa.select(c.node_id).where(c.owner == owner).order_by(c.node_id).with_for_update())
        node_ids = [row.node_id for row in held]
        if node_ids:
            self._later(sa.update(m.nodes).where(c.owner == owner).values(owner=None))
        return node_ids

    def used_slots(self, node_ids: Iterable[str] | None = None) -> dict[str, int]:
        """Slots taken, by node; also by jobs that ended while the node was away. What a dead daemon held is free."""
        rows = self._db.execute(_USED).all() if node_ids is None else self._among(_USED_THERE, node_ids)
        return {row.node_id: int(row.used) for row in rows}


# ---- statements that are run often: made once

_LOCKED_NODES = Among(sa.select(m.nodes).order_by(m.nodes.c.node_id).with_for_update(), m.nodes.c.node_id)
_USED = (
    sa.select(m.job_hosts.c.node_id, sa.func.sum(m.job_hosts.c.nranks).label("used"))
    .join(m.nodes, sa.and_(m.nodes.c.node_id == m.job_hosts.c.node_id, m.nodes.c.boot_id == m.job_hosts.c.boot_id))
    .where(m.job_hosts.c.phase < Phase.STOPPED.value)
    .group_by(m.job_hosts.c.node_id)
)
_USED_THERE = Among(_USED, m.job_hosts.c.node_id)


@cache
def _put_beat(dialect: str) -> sa.Insert:
    statement = insert_into(m.coordinators, dialect)
    return statement.on_conflict_do_update(index_elements=["owner"], set_={"clock": statement.excluded.clock})


@cache
def _put_node(dialect: str) -> sa.Insert:
    statement = insert_into(m.nodes, dialect)
    new = {column.name: column for column in statement.excluded if column.name not in _KEPT}
    return statement.on_conflict_do_update(index_elements=["node_id"], set_=new)
