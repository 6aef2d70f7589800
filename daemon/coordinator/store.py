"""Queries. A Store opens transactions; what a transaction returns and takes are values of ``domain``.

Threads: a Store may be used from several, a Transaction from one. Every transaction is a write transaction: SQLite
takes its only write lock at the start (so there is nothing to upgrade and no deadlock), PostgreSQL locks the rows that
``lock=True`` names. Never call the network inside one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from bagua.daemon.coordinator import models as m
from bagua.daemon.coordinator.domain import (
    Event,
    HostRecord,
    JobRecord,
    JobSpec,
    JobState,
    NodeRecord,
    NodeView,
    Phase,
    RankRecord,
    RankState,
)
from bagua.daemon.coordinator.translate import brief_of, spec_from_wire
from bagua.daemon.coordinator.trouble import told_in_words

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

_JOBS = sa.select(m.jobs, m.job_specs.c.spec).join(m.job_specs, m.job_specs.c.job_id == m.jobs.c.job_id)
_TERMINAL = [state.value for state in JobState if state.terminal]
_CHUNK = 500  # bound values in one IN (...)
_RANK_FIELDS = tuple(field.name for field in fields(RankRecord))


class StaleError(Exception):
    """Somebody else changed the job since it was read: the result is dropped."""


class Store:
    """The database, through an engine made by ``database.open_engine``."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    @property
    def shared(self) -> bool:
        """True if other coordinators may use the same database."""
        return self._engine.dialect.name != "sqlite"

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Commits at the end, rolls back on an exception. Raises UnavailableError or ServiceError with words for what
        is wrong with the database, at the beginning, at any query, or at the commit."""
        with told_in_words(self._engine.url), self._engine.begin() as connection:
            yield Transaction(connection)

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()


class Transaction:
    """One transaction."""

    def __init__(self, connection: sa.Connection) -> None:
        self._db = connection
        self._revisions: dict[str, int] = {}

    # ---- jobs

    def create_job(self, job: JobRecord, idempotency_key: str | None) -> bool:
        """False if the key is taken: then nothing was written."""
        values = {
            **_job_row(job),
            "job_id": job.job_id,
            "idempotency_key": idempotency_key,
            "name": job.spec.name,
            "brief": brief_of(job.spec.wire),
            "created_at": job.created_at,
            "job_key": job.job_key,
            "last_event": 0,
            "revision": 1,
            "lease_expires_at": 0.0,
        }
        statement = self._insert(m.jobs).values(values).on_conflict_do_nothing(index_elements=["idempotency_key"])
        if self._db.execute(statement.returning(m.jobs.c.job_id)).one_or_none() is None:
            return False
        self._db.execute(sa.insert(m.job_specs).values(job_id=job.job_id, spec=job.spec.wire))
        self._revisions[job.job_id] = 1
        return True

    def job(self, job_id: str, lock: bool = False) -> JobRecord | None:
        """The job with its hosts and ranks."""
        query = _JOBS.where(m.jobs.c.job_id == job_id)
        row = self._db.execute(query.with_for_update(of=m.jobs) if lock else query).mappings().one_or_none()
        return None if row is None else self._assemble(row)

    def job_by_key(self, idempotency_key: str) -> JobRecord | None:
        """The job that was submitted with the key."""
        query = sa.select(m.jobs.c.job_id).where(m.jobs.c.idempotency_key == idempotency_key)
        job_id = self._db.execute(query).scalar_one_or_none()
        return None if job_id is None else self.job(job_id)

    def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """Whatever ``query`` finds; for lists."""
        return self._db.execute(query).all()

    def unfinished(self) -> dict[str, int]:
        """Job id -> revision of every job that has not ended, the oldest first."""
        query = (
            sa.select(m.jobs.c.job_id, m.jobs.c.revision)
            .where(m.jobs.c.state.not_in(_TERMINAL))
            .order_by(m.jobs.c.created_at, m.jobs.c.job_id)
        )
        return {row.job_id: row.revision for row in self._db.execute(query)}

    def job_counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        query = sa.select(m.jobs.c.state, sa.func.count()).group_by(m.jobs.c.state)
        return {JobState(state): count for state, count in self._db.execute(query)}

    def pending(self) -> list[str]:
        """Ids of the jobs that wait for nodes, the oldest first."""
        query = sa.select(m.jobs.c.job_id).where(m.jobs.c.state == JobState.PENDING.value)
        return list(self._db.execute(query.order_by(m.jobs.c.created_at, m.jobs.c.job_id)).scalars())

    def jobs_on_node(self, node_id: str) -> list[str]:
        """Ids of jobs of which something may be left on the node."""
        query = (
            sa.select(m.job_hosts.c.job_id)
            .where(m.job_hosts.c.node_id == node_id, m.job_hosts.c.phase < Phase.STOPPED.value)
            .order_by(m.job_hosts.c.job_id)
        )
        return list(self._db.execute(query).scalars())

    def save_job(self, old: JobRecord, new: JobRecord, events: Iterable[Event] = ()) -> tuple[Event, ...]:
        """Writes what differs from ``old`` (which this transaction has read), and the events; returns these with their
        numbers. Raises StaleError if the job was changed in between."""
        added = tuple(events)
        if old == new and not added:
            return ()
        job_id = new.job_id
        c = m.jobs.c
        statement = (
            sa.update(m.jobs)
            .where(c.job_id == job_id, c.revision == self._revisions[job_id])
            .values(**_job_row(new), revision=c.revision + 1, last_event=c.last_event + len(added))
            .returning(c.last_event, c.revision)
        )
        row = self._db.execute(statement).one_or_none()
        if row is None:
            raise StaleError(job_id)
        self._revisions[job_id] = row.revision
        self._save_members(old, new)
        first = row.last_event - len(added) + 1
        numbered = tuple(replace(event, seq=first + index) for index, event in enumerate(added))
        if numbered:
            self._db.execute(sa.insert(m.events), [{"job_id": job_id, **_values(event)} for event in numbered])
        return numbered

    def events(self, job_id: str, after_seq: int, limit: int) -> list[Event]:
        """Events with ``seq > after_seq``, in order."""
        c = m.events.c
        query = sa.select(m.events).where(c.job_id == job_id, c.seq > after_seq).order_by(c.seq).limit(limit)
        return [Event(row.kind, row.reason, row.generation, row.time, row.seq) for row in self._db.execute(query)]

    def generations(self, job_id: str) -> list[tuple[int, list[dict[str, Any]]]]:
        """(number, members) of every generation of the job, in order."""
        c = m.generations.c
        query = sa.select(c.number, c.members).where(c.job_id == job_id).order_by(c.number)
        return [(row.number, row.members) for row in self._db.execute(query)]

    def master_ports(self) -> set[int]:
        """Ports that unfinished jobs use."""
        query = sa.select(m.jobs.c.master_port).where(m.jobs.c.state.not_in(_TERMINAL))
        return set(self._db.execute(query).scalars())

    # ---- leases: the right to decide about a job

    def acquire_lease(self, job_id: str, owner: str, now: float, expires_at: float) -> bool:
        """True if ``owner`` holds the lease now: it was free, expired, or held by ``owner`` before."""
        c = m.jobs.c
        free = sa.or_(c.lease_owner.is_(None), c.lease_owner == owner, c.lease_expires_at <= now)
        statement = sa.update(m.jobs).where(c.job_id == job_id, free)
        return self._db.execute(statement.values(lease_owner=owner, lease_expires_at=expires_at)).rowcount == 1

    def renew_leases(self, owner: str, expires_at: float) -> int:
        """Prolongs every lease that ``owner`` still holds; returns how many."""
        c = m.jobs.c
        statement = sa.update(m.jobs).where(c.lease_owner == owner, c.state.not_in(_TERMINAL))
        return self._db.execute(statement.values(lease_expires_at=expires_at)).rowcount

    def release_lease(self, job_id: str, owner: str) -> bool:
        """True if ``owner`` held it."""
        return self._release(m.jobs.c.job_id == job_id, owner) == 1

    def release_leases(self, owner: str) -> int:
        """Gives back every lease of ``owner``."""
        return self._release(sa.true(), owner)

    def _release(self, which: sa.ColumnElement[bool], owner: str) -> int:
        statement = sa.update(m.jobs).where(which, m.jobs.c.lease_owner == owner)
        return self._db.execute(statement.values(lease_owner=None, lease_expires_at=0.0)).rowcount

    # ---- nodes

    def put_node(self, node: NodeRecord) -> None:
        """Inserts or replaces."""
        values = _values(node)
        statement = self._insert(m.nodes).values(values)
        del values["node_id"]
        self._db.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=values))

    def node(self, node_id: str, lock: bool = False) -> NodeRecord | None:
        """One node."""
        query = sa.select(m.nodes).where(m.nodes.c.node_id == node_id)
        row = self._db.execute(query.with_for_update() if lock else query).mappings().one_or_none()
        return None if row is None else NodeRecord(**row)

    def node_views(
        self, owner: str, alive_since: float, only: Sequence[str] | None = None, lock: bool = False
    ) -> dict[str, NodeView]:
        """Nodes with their used slots, by id. A node counts as connected if ``owner`` holds its session, or another
        coordinator does and the node was seen at ``alive_since`` or later. ``lock``: nobody else places jobs until the
        end of the transaction."""
        query = sa.select(m.nodes).order_by(m.nodes.c.node_id)
        if only is not None:
            rows: list[Any] = []
            for start in range(0, len(only), _CHUNK):
                part = query.where(m.nodes.c.node_id.in_(only[start : start + _CHUNK]))
                rows += self._db.execute(part).all()
        else:
            rows = list(self._db.execute(query.with_for_update() if lock else query).all())
        used = self._used_slots()
        return {
            row.node_id: NodeView(
                node_id=row.node_id,
                hostname=row.hostname,
                address=row.address,
                boot_id=row.boot_id,
                slots=row.slots,
                used=used.get(row.node_id, 0),
                connected=row.owner == owner or (row.owner is not None and row.last_seen >= alive_since),
                last_seen=row.last_seen,
            )
            for row in rows
        }

    def node_versions(self) -> dict[str, str]:
        """Node id -> version of its daemon."""
        return {row.node_id: row.version for row in self._db.execute(sa.select(m.nodes.c.node_id, m.nodes.c.version))}

    def touch_nodes(self, node_ids: Sequence[str], owner: str, now: float) -> None:
        """``now`` as the time when the nodes were last heard of, for those whose session ``owner`` holds."""
        c = m.nodes.c
        for start in range(0, len(node_ids), _CHUNK):
            part = node_ids[start : start + _CHUNK]
            self._db.execute(sa.update(m.nodes).where(c.node_id.in_(part), c.owner == owner).values(last_seen=now))

    def disconnect_node(self, node_id: str, owner: str, boot_id: str, last_seen: float) -> bool:
        """Marks that the session is gone, unless another one has replaced it."""
        c = m.nodes.c
        statement = sa.update(m.nodes).where(c.node_id == node_id, c.owner == owner, c.boot_id == boot_id)
        return self._db.execute(statement.values(owner=None, last_seen=last_seen)).rowcount == 1

    def disconnect_all(self, owner: str) -> int:
        """Marks that ``owner`` holds no session."""
        return self._db.execute(sa.update(m.nodes).where(m.nodes.c.owner == owner).values(owner=None)).rowcount

    # ---- helpers

    def _insert(self, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
        if self._db.dialect.name == "sqlite":
            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql  # not worth its time at start where there is SQLite

        return postgresql.insert(table)

    def _used_slots(self) -> dict[str, int]:
        """Slots taken, by node; also by jobs that ended while the node was away. What a dead daemon held is free."""
        h, n = m.job_hosts.c, m.nodes.c
        query = (
            sa.select(h.node_id, sa.func.sum(h.nranks))
            .join(m.nodes, sa.and_(n.node_id == h.node_id, n.boot_id == h.boot_id))
            .where(h.phase < Phase.STOPPED.value)
            .group_by(h.node_id)
        )
        return {node_id: int(used) for node_id, used in self._db.execute(query)}

    def _assemble(self, row: sa.RowMapping) -> JobRecord:
        job_id = row["job_id"]
        self._revisions[job_id] = row["revision"]
        return _job_record(row, self._hosts(job_id), self._ranks(job_id))

    def _hosts(self, job_id: str) -> tuple[HostRecord, ...]:
        h = m.job_hosts.c
        query = sa.select(m.job_hosts).where(h.job_id == job_id).order_by(h.host_index)
        return tuple(_host_record(row) for row in self._db.execute(query).mappings())

    def _ranks(self, job_id: str) -> tuple[RankRecord, ...]:
        """There may be very many: so by position, without a mapping for each row."""
        r = m.job_ranks.c
        query = sa.select(*(r[name] for name in _RANK_FIELDS)).where(r.job_id == job_id).order_by(r.rank)
        states = {state.value: state for state in RankState}
        return tuple(
            RankRecord(rank, local_rank, node_id, states[state], *rest)
            for rank, local_rank, node_id, state, *rest in self._db.execute(query)
        )

    def _save_members(self, old: JobRecord, new: JobRecord) -> None:
        job_id = new.job_id
        if new.generation != old.generation:
            for table in (m.job_hosts, m.job_ranks):
                self._db.execute(sa.delete(table).where(table.c.job_id == job_id))
            self._db.execute(sa.insert(m.job_hosts), [{"job_id": job_id, **_host_row(host)} for host in new.hosts])
            self._db.execute(sa.insert(m.job_ranks), [{"job_id": job_id, **_values(rank)} for rank in new.ranks])
            members = [{"node_id": h.node_id, "first_rank": h.first_rank, "nranks": h.nranks} for h in new.hosts]
            self._db.execute(
                sa.insert(m.generations).values(
                    job_id=job_id,
                    number=new.generation,
                    members=members,
                    created_at=_changed_at(new),
                    reason=new.reason,
                )
            )
            return
        for host, before in zip(new.hosts, old.hosts, strict=True):
            if host != before:
                h = m.job_hosts.c
                where = sa.and_(h.job_id == job_id, h.host_index == host.index)
                self._db.execute(sa.update(m.job_hosts).where(where).values(_host_row(host)))
        changed = [
            rank for rank, before in zip(new.ranks, old.ranks, strict=True) if rank is not before and rank != before
        ]
        if changed:
            r = m.job_ranks.c
            where = sa.and_(r.job_id == job_id, r.rank == sa.bindparam("number"))
            columns: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in _RANK_FIELDS if name != "rank"}
            rows = [{f"new_{name}": value for name, value in _values(rank).items()} for rank in changed]
            for row in rows:
                row["number"] = row.pop("new_rank")
            self._db.execute(sa.update(m.job_ranks).where(where).values(columns), rows)


def _values(record: Event | NodeRecord | RankRecord) -> dict[str, Any]:
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    """What every database driver takes."""
    return int(value) if isinstance(value, enum.IntEnum) else value


def _host_row(host: HostRecord) -> dict[str, Any]:
    row = {field.name: _plain(getattr(host, field.name)) for field in fields(host)}
    row["host_index"] = row.pop("index")
    return row


def _changed_at(job: JobRecord) -> float:
    return max(job.created_at, job.started_at, job.stopping_at)


def _job_row(job: JobRecord) -> dict[str, Any]:
    """Columns that change during the life of a job."""
    return {
        "state": _plain(job.state),
        "reason": job.reason,
        "outcome": _plain(job.outcome),
        "cancel_reason": job.cancel_reason,
        "generation": job.generation,
        "started_at": job.started_at,
        "stopping_at": job.stopping_at,
        "finished_at": job.finished_at,
        "master_addr": job.master_addr,
        "master_port": job.master_port,
    }


def _job_record(row: Mapping[Any, Any], hosts: tuple[HostRecord, ...], ranks: tuple[RankRecord, ...]) -> JobRecord:
    spec: JobSpec = spec_from_wire(row["spec"])
    return JobRecord(
        job_id=row["job_id"],
        spec=spec,
        created_at=row["created_at"],
        state=JobState(row["state"]),
        reason=row["reason"],
        outcome=None if row["outcome"] is None else JobState(row["outcome"]),
        cancel_reason=row["cancel_reason"],
        generation=row["generation"],
        started_at=row["started_at"],
        stopping_at=row["stopping_at"],
        finished_at=row["finished_at"],
        master_addr=row["master_addr"],
        master_port=row["master_port"],
        job_key=row["job_key"],
        hosts=hosts,
        ranks=ranks,
    )


def _host_record(row: Mapping[Any, Any]) -> HostRecord:
    values = {key: row[key] for key in row if key not in ("job_id", "host_index")}
    values["phase"] = Phase(values["phase"])
    return HostRecord(index=row["host_index"], **values)
