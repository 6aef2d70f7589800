"""Queries the database. A Store opens transactions; they take and return values of ``domain``.

Threads: a Store may be used from several, a Transaction from one. SQLite has one write lock, which ``transaction``
takes at its start (so there is nothing to upgrade and no deadlock); ``read`` takes none. Never call the network inside
one.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from bagua.daemon.coordinator import models as m
from bagua.daemon.coordinator.account_store import AccountQueries
from bagua.daemon.coordinator.database import READ_ONLY
from bagua.daemon.coordinator.domain import (
    Change,
    Event,
    HostRecord,
    JobRecord,
    JobSpec,
    JobState,
    NodeRecord,
    Phase,
    Plan,
    RankRecord,
    RankState,
    Stored,
)
from bagua.daemon.coordinator.translate import brief_of, spec_from_wire
from bagua.daemon.coordinator.trouble import told_in_words

_JOBS = sa.select(m.jobs, m.job_specs.c.spec).join(m.job_specs, m.job_specs.c.job_id == m.jobs.c.job_id)
_UNFINISHED = [state.value for state in JobState if not state.terminal]
_ROW_BYTES = 200  # what a row takes beside its text, about
_TOGETHER = 3  # changed jobs from which on a server of a database is asked for all of them at once
_CHUNK = 500  # bound values in one IN (...)


class Store:
    """The database, through an engine made by ``database.open_engine``. ``shared``: other coordinators may use it too;
    without a word this is so for all but SQLite."""

    def __init__(self, engine: sa.Engine, shared: bool | None = None) -> None:
        self._engine = engine
        self.shared = engine.dialect.name != "sqlite" if shared is None else shared

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Commits at the end, rolls back on an exception. Raises UnavailableError or ServiceError with words for what
        is wrong with the database, at the beginning, at any query, or at the commit."""
        with told_in_words(self._engine.url), self._engine.begin() as connection:
            yield Transaction(connection)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """As of one moment. Waits for no writer, and no writer waits for it. Raises as ``transaction``."""
        with told_in_words(self._engine.url), self._engine.connect() as connection:
            yield Transaction(connection.execution_options(**{READ_ONLY: True}))

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()


class Transaction(AccountQueries):
    """One transaction."""

    # ---- jobs

    def create_job(self, job: JobRecord, idempotency_key: str | None, owner: str, events: Iterable[Event] = ()) -> bool:
        """False if the key is taken: then nothing was written."""
        added = tuple(events)
        values = {
            **_job_row(job),
            "job_id": job.job_id,
            "idempotency_key": idempotency_key,
            "name": job.spec.name,
            "brief": brief_of(job.spec.wire),
            "created_at": job.created_at,
            "submitted_clock": job.submitted_clock,
            "job_key": job.job_key,
            **{name: getattr(job, name) for name in _ORIGIN},
            "last_event": len(added),
            "revision": 1,
            "lease_owner": owner,
        }
        statement = self._insert(m.jobs).values(values).on_conflict_do_nothing(index_elements=["idempotency_key"])
        if self._db.execute(statement.returning(m.jobs.c.job_id)).one_or_none() is None:
            return False
        self._db.execute(sa.insert(m.job_specs).values(job_id=job.job_id, spec=job.spec.wire))
        if job.spec.code:
            self.note_job_code(job.job_id, job.spec.code)
        self._add_events([_event_row(job.job_id, seq, event) for seq, event in enumerate(added, 1)])
        return True

    def job(self, job_id: str) -> JobRecord | None:
        """The job with its hosts and ranks."""
        found = self.stored([job_id])
        return found[0].job if found else None

    def stored(self, job_ids: Sequence[str]) -> list[Stored]:
        """Those of the jobs that there are, complete."""
        found: list[Stored] = []
        for start in range(0, len(job_ids), _CHUNK):
            query = _JOBS.where(m.jobs.c.job_id.in_(job_ids[start : start + _CHUNK]))
            found += self._assemble(self._db.execute(query).mappings().all())
        return found

    def job_by_key(self, idempotency_key: str) -> JobRecord | None:
        """The job that was submitted with the key."""
        query = sa.select(m.jobs.c.job_id).where(m.jobs.c.idempotency_key == idempotency_key)
        job_id = self._db.execute(query).scalar_one_or_none()
        return None if job_id is None else self.job(job_id)

    def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        """All rows that ``query`` finds; for lists."""
        return self._db.execute(query).all()

    def revision(self, job_id: str) -> int | None:
        """Of a job, if there is one."""
        found: int | None = self._db.execute(sa.select(m.jobs.c.revision).where(m.jobs.c.job_id == job_id)).scalar()
        return found

    def live(self) -> dict[str, int]:
        """Job id -> revision of every job that has not ended, or of which something may be left on a node; the oldest
        first."""
        c, h = m.jobs.c, m.job_hosts.c
        unfinished = sa.select(c.created_at, c.job_id, c.revision).where(c.state.in_(_UNFINISHED))
        left = sa.select(c.created_at, c.job_id, c.revision).where(
            c.job_id.in_(sa.select(h.job_id).where(h.phase < Phase.STOPPED.value))
        )
        rows = self._db.execute(unfinished.union(left).order_by("created_at", "job_id"))
        return {row.job_id: row.revision for row in rows}

    def job_counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        query = sa.select(m.jobs.c.state, sa.func.count()).group_by(m.jobs.c.state)
        return {JobState(state): count for state, count in self._db.execute(query)}

    def save(self, changes: Sequence[Change], check_slots: bool = False) -> set[str]:
        """Writes what differs, and the events, of each change whose job nobody has changed meanwhile; returns the
        others' ids. ``check_slots``: other coordinators place jobs too; a placement that does not fit beside theirs
        counts as stale."""
        stale: set[str] = set()
        if check_slots:
            stale = self._oversubscribed([change for change in changes if change.placed])
        stale |= self._update_jobs([change for change in changes if change.job.job_id not in stale])
        events: list[dict[str, Any]] = []
        hosts: list[dict[str, Any]] = []
        for change in changes:
            job_id = change.job.job_id
            if job_id in stale:
                continue
            numbered = enumerate(change.events, change.old.last_event + 1)
            events += [_event_row(job_id, seq, event) for seq, event in numbered]
            if change.regroups:
                self._replace_hosts(change.job)
            else:
                hosts += _changed_hosts(change)
        if hosts:
            self._db.execute(_UPDATE_HOST, hosts)
        self._add_events(events)
        return stale

    def events(self, job_id: str, after_seq: int, limit: int) -> list[Event]:
        """Events with ``seq > after_seq``, in order."""
        c = m.events.c
        query = sa.select(m.events).where(c.job_id == job_id, c.seq > after_seq).order_by(c.seq).limit(limit)
        return [Event(row.kind, row.reason, row.generation, row.time, row.seq) for row in self._db.execute(query)]

    # ---- what expires

    def expired(self, ended_before: float, keep: int, limit: int) -> list[str]:
        """Ids of jobs that ended before that time, or beyond the ``keep`` newest; the oldest, ``limit`` at most."""
        c = m.jobs.c
        ended = c.finished_at > 0
        count = self._db.execute(sa.select(sa.func.count()).select_from(m.jobs).where(ended)).scalar_one()
        query = sa.select(c.job_id, c.finished_at).where(ended).order_by(c.finished_at).limit(limit)
        rows = self._db.execute(query).all()
        return [row.job_id for index, row in enumerate(rows) if index < count - keep or row.finished_at < ended_before]

    def ended_bytes(self) -> int:
        """About how much the jobs that have ended, their hosts and events take in the database. Reads all of them."""
        ended = sa.select(m.jobs.c.job_id).where(m.jobs.c.finished_at > 0)
        found = 0
        for table, length in (
            (m.job_specs, sa.func.length(m.job_specs.c.spec)),
            (m.job_hosts, sa.func.length(m.job_hosts.c.ranks)),
            (m.events, sa.func.length(m.events.c.reason)),
        ):
            size = sa.func.coalesce(sa.func.sum(length + _ROW_BYTES), 0)
            found += int(self._db.execute(sa.select(size).where(table.c.job_id.in_(ended))).scalar_one())
        return found

    def delete_jobs(self, job_ids: Sequence[str]) -> None:
        """With all that belongs to them."""
        self._db.execute(sa.delete(m.jobs).where(m.jobs.c.job_id.in_(job_ids)))

    # ---- coordinators

    def beat(self, owner: str, clock: float) -> None:
        """``owner`` lives."""
        statement = self._insert(m.coordinators).values(owner=owner, clock=clock)
        self._db.execute(statement.on_conflict_do_update(index_elements=["owner"], set_={"clock": clock}))

    def beats(self) -> dict[str, float]:
        """Owner -> its clock at its last beat."""
        return {row.owner: row.clock for row in self._db.execute(sa.select(m.coordinators))}

    def release_jobs(self, owner: str) -> int:
        """Gives back the right to decide, so that others need not wait; returns how many jobs it was."""
        c = m.jobs.c
        statement = sa.update(m.jobs).where(c.lease_owner == owner, c.state.in_(_UNFINISHED))
        return self._db.execute(statement.values(lease_owner=None, revision=c.revision + 1)).rowcount

    # ---- nodes

    def put_node(self, node: NodeRecord) -> None:
        """Inserts or replaces, but for the wish that it drains."""
        values = _values(node)
        statement = self._insert(m.nodes).values(values)
        del values["node_id"], values["draining"]
        self._db.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=values))

    def node(self, node_id: str, lock: bool = False) -> NodeRecord | None:
        """One node."""
        query = sa.select(m.nodes).where(m.nodes.c.node_id == node_id)
        row = self._db.execute(query.with_for_update() if lock else query).mappings().one_or_none()
        return None if row is None else NodeRecord(**row)

    def nodes(self) -> list[NodeRecord]:
        """All, by id."""
        return [
            NodeRecord(**row) for row in self._db.execute(sa.select(m.nodes).order_by(m.nodes.c.node_id)).mappings()
        ]

    def mark_node(self, node_id: str, draining: bool | None, leaving: bool | None) -> None:
        """That a node drains, or not: as a user has asked, as its daemon says. None: as it was."""
        marks = {name: mark for name, mark in (("draining", draining), ("leaving", leaving)) if mark is not None}
        if marks:
            self._db.execute(sa.update(m.nodes).where(m.nodes.c.node_id == node_id).values(marks))

    def seen(self, owner: str, now: float) -> None:
        """``now`` as the time when the nodes with ``owner`` were heard of; for people."""
        self._db.execute(sa.update(m.nodes).where(m.nodes.c.owner == owner).values(last_seen=now))

    def disconnect_node(self, node_id: str, owner: str, last_seen: float) -> bool:
        """Marks that ``owner`` holds no session of the node, whichever run of its daemon was written down last: the
        ends of several may have waited for the database together."""
        c = m.nodes.c
        statement = sa.update(m.nodes).where(c.node_id == node_id, c.owner == owner)
        return self._db.execute(statement.values(owner=None, last_seen=last_seen)).rowcount == 1

    def disconnect_all(self, owner: str) -> int:
        """Marks that ``owner`` holds no session."""
        return self._db.execute(sa.update(m.nodes).where(m.nodes.c.owner == owner).values(owner=None)).rowcount

    def used_slots(self, node_ids: Sequence[str] | None = None) -> dict[str, int]:
        """Slots taken, by node; also by jobs that ended while the node was away. What a dead daemon held is free."""
        h, n = m.job_hosts.c, m.nodes.c
        query = (
            sa.select(h.node_id, sa.func.sum(h.nranks))
            .join(m.nodes, sa.and_(n.node_id == h.node_id, n.boot_id == h.boot_id))
            .where(h.phase < Phase.STOPPED.value)
            .group_by(h.node_id)
        )
        if node_ids is not None:
            query = query.where(h.node_id.in_(node_ids))
        return {node_id: int(used) for node_id, used in self._db.execute(query)}

    # ---- helpers

    def _oversubscribed(self, placements: Sequence[Change]) -> set[str]:
        """Jobs whose placement does not fit beside what the database knows. Until the end of the transaction nobody
        else takes slots of these nodes."""
        wanted = sorted({host.node_id for change in placements for host in change.placed})
        free: dict[str, int] = {}
        boots: dict[str, str] = {}
        for start in range(0, len(wanted), _CHUNK):
            part = wanted[start : start + _CHUNK]
            query = sa.select(m.nodes).where(m.nodes.c.node_id.in_(part)).order_by(m.nodes.c.node_id)
            rows = self._db.execute(query.with_for_update()).all()
            used = self.used_slots(part)
            free.update({row.node_id: row.slots - used.get(row.node_id, 0) for row in rows})
            boots.update({row.node_id: row.boot_id for row in rows})
        refused: set[str] = set()
        for change in placements:
            if any(boots.get(host.node_id) != host.boot_id for host in change.placed):
                refused.add(change.job.job_id)
                continue
            takes = {host.node_id: change.takes(host.node_id, host.boot_id) for host in change.placed}
            if any(takes[node_id] > free[node_id] for node_id in takes):
                refused.add(change.job.job_id)
                continue
            for node_id in takes:
                free[node_id] -= takes[node_id]
        return refused

    def _update_jobs(self, changes: Sequence[Change]) -> set[str]:
        """Writes the jobs' own rows, each unless somebody has changed it meanwhile; returns the ids of those. A server
        is asked twice for all of them, not once for each: there an answer takes longer than the work."""
        if len(changes) < _TOGETHER or self._db.dialect.name == "sqlite":
            return {
                change.job.job_id
                for change in changes
                if self._db.execute(_UPDATE_JOB, _changed_job(change)).rowcount != 1
            }
        known: dict[str, int] = {}
        wanted = [change.job.job_id for change in changes]
        c = m.jobs.c
        for start in range(0, len(wanted), _CHUNK):
            query = sa.select(c.job_id, c.revision).where(c.job_id.in_(wanted[start : start + _CHUNK]))
            rows = self._db.execute(query.order_by(c.job_id).with_for_update())  # until the end of the transaction
            known.update({row.job_id: row.revision for row in rows})
        fresh = [change for change in changes if known.get(change.job.job_id) == change.old.revision]
        if fresh:
            self._db.execute(_UPDATE_JOB, [_changed_job(change) for change in fresh])
        return set(wanted) - {change.job.job_id for change in fresh}

    def _replace_hosts(self, job: JobRecord) -> None:
        self._db.execute(sa.delete(m.job_hosts).where(m.job_hosts.c.job_id == job.job_id))
        self._db.execute(sa.insert(m.job_hosts), [_host_row(job.job_id, host) for host in job.parts])

    def _add_events(self, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._db.execute(_INSERT_EVENT, rows)

    def _assemble(self, rows: Sequence[sa.RowMapping]) -> list[Stored]:
        hosts = self._hosts([row["job_id"] for row in rows])
        return [
            Stored(
                _job_record(row, tuple(hosts.get(row["job_id"], ()))),
                row["revision"],
                row["last_event"],
                row["lease_owner"],
            )
            for row in rows
        ]

    def _hosts(self, ids: Sequence[str]) -> dict[str, list[HostRecord]]:
        found: dict[str, list[HostRecord]] = {}
        h = m.job_hosts.c
        for start in range(0, len(ids), _CHUNK):
            query = sa.select(m.job_hosts).where(h.job_id.in_(ids[start : start + _CHUNK]))
            for row in self._db.execute(query.order_by(h.job_id, h.host_index)).mappings():
                found.setdefault(row["job_id"], []).append(_host_record(row))
        return found


# ---- rows


def _values(record: NodeRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _event_row(job_id: str, seq: int, event: Event) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "seq": seq,
        "time": event.time,
        "kind": event.kind,
        "reason": event.reason,
        "generation": event.generation,
    }


def _changed_job(change: Change) -> dict[str, Any]:
    return {
        **_job_row(change.job),
        "p_job_id": change.job.job_id,
        "p_revision": change.old.revision,
        "lease_owner": change.owner,
        "last_event": change.stored.last_event,
        "revision": change.stored.revision,
    }


def _changed_hosts(change: Change) -> list[dict[str, Any]]:
    pairs = zip(change.job.parts, change.old.job.parts, strict=True)
    rows = [_host_row(change.job.job_id, host) for host, before in pairs if host is not before and host != before]
    for row in rows:
        row["p_job_id"], row["p_host_index"] = row.pop("job_id"), row.pop("host_index")
    return rows


def _plain(value: Any) -> Any:
    """Every database driver takes it."""
    if isinstance(value, tuple):
        return json.dumps(value) if value else ""
    return int(value) if isinstance(value, enum.IntEnum) else value


# Columns of JobRecord that need no word about how.
_JOB_FIELDS = ("stalls", "wanted_nodes", "paused", "next_member", "failures", "retry_clock", "respawns", "plan")
_ORIGIN = ("namespace", "submitted_by", "unix_user")  # written once
_HOST_FIELDS = tuple(field.name for field in fields(HostRecord) if field.name not in ("index", "ranks"))


_RANK_FIELDS = tuple(field.name for field in fields(RankRecord) if field.name not in ("rank", "local_rank", "node_id"))


def _host_row(job_id: str, host: HostRecord) -> dict[str, Any]:
    row = {name: _plain(getattr(host, name)) for name in _HOST_FIELDS}
    return {**row, "job_id": job_id, "host_index": host.index, "ranks": _ranks_text(host.ranks)}


def _ranks_text(ranks: Sequence[RankRecord]) -> str:
    if all(rank == RankRecord(rank.rank, rank.local_rank, rank.node_id) for rank in ranks):
        return ""
    return json.dumps([[getattr(rank, name) for name in _RANK_FIELDS] for rank in ranks], separators=(",", ":"))


def _ranks(host: Mapping[Any, Any]) -> tuple[RankRecord, ...]:
    first, node_id = host["first_rank"], host["node_id"]
    if not host["ranks"]:
        return tuple(RankRecord(first + local, local, node_id) for local in range(host["nranks"]))
    return tuple(  # rows of the first versions have no member
        RankRecord(first + local, local, node_id, RankState(state), *rest)
        for local, (state, *rest) in enumerate(json.loads(host["ranks"]))
    )


def _job_row(job: JobRecord) -> dict[str, Any]:
    """Columns that change during the life of a job."""
    return {
        "state": _plain(job.state),
        "reason": job.reason,
        "outcome": _plain(job.outcome),
        "cancel_reason": job.cancel_reason,
        "generation": job.generation,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "placed_clock": job.placed_clock,
        "stopping_clock": job.stopping_clock,
        **{name: _plain(getattr(job, name)) for name in _JOB_FIELDS},
        "master_addr": job.master_addr,
        "master_port": job.master_port,
    }


def _job_record(row: Mapping[Any, Any], hosts: tuple[HostRecord, ...]) -> JobRecord:
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
        finished_at=row["finished_at"],
        submitted_clock=row["submitted_clock"],
        placed_clock=row["placed_clock"],
        stopping_clock=row["stopping_clock"],
        **{name: row[name] for name in _JOB_FIELDS if name not in ("plan", "respawns")},
        plan=Plan(row["plan"]),
        respawns=tuple((node_id, at) for node_id, at in json.loads(row["respawns"] or "[]")),
        master_addr=row["master_addr"],
        master_port=row["master_port"],
        job_key=row["job_key"],
        **{name: row[name] for name in _ORIGIN},
        hosts=tuple(host for host in hosts if host.index >= 0),
        former=tuple(reversed([host for host in hosts if host.index < 0 and not host.joining])),
        joining=tuple(reversed([host for host in hosts if host.joining])),
    )


def _host_record(row: Mapping[Any, Any]) -> HostRecord:
    values = {name: row[name] for name in _HOST_FIELDS}
    values["phase"] = Phase(values["phase"])
    values["lost_hosts"] = tuple(json.loads(values["lost_hosts"] or "[]"))
    return HostRecord(index=row["host_index"], **values, ranks=_ranks(row))


# ---- statements that are run often: made once

_UPDATE_JOB = (
    sa.update(m.jobs)
    .where(m.jobs.c.job_id == sa.bindparam("p_job_id"), m.jobs.c.revision == sa.bindparam("p_revision"))
    .values(
        {
            name: sa.bindparam(name)
            for name in (
                *_job_row(JobRecord("", JobSpec("", 0, 0, 0.0, 0.0, 0, b""), 0.0)),
                "lease_owner",
                "last_event",
                "revision",
            )
        }
    )
)
_UPDATE_HOST = (
    sa.update(m.job_hosts)
    .where(m.job_hosts.c.job_id == sa.bindparam("p_job_id"), m.job_hosts.c.host_index == sa.bindparam("p_host_index"))
    .values({name: sa.bindparam(name) for name in (*_HOST_FIELDS, "ranks")})
)
_INSERT_EVENT = sa.insert(m.events)
