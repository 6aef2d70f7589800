"""Queries the database. A Store opens transactions; they take and return values of ``domain``.

Threads: a Store may be used from several, a Transaction from one. SQLite has one write lock, which ``transaction``
takes at its start (so there is nothing to upgrade and no deadlock); ``read`` takes none. PostgreSQL has locks of rows:
``node_store`` says in which order. Never call the network inside one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import sqlalchemy as sa

from bagua.daemon.coordinator.rules.domain import (
    Change,
    Event,
    HostRecord,
    JobRecord,
    JobState,
    NodeRecord,
    Phase,
    Stored,
    reshaped,
)
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.database_errors import broken_off, told_in_words
from bagua.daemon.coordinator.store.execution import READ_ONLY
from bagua.daemon.coordinator.store.node_store import NodeQueries
from bagua.daemon.coordinator.store.queries import UNFINISHED, Among, insert_into
from bagua.daemon.coordinator.store.rows import (
    DELETE_HOSTS,
    INSERT_EVENT,
    INSERT_HOST,
    INSERT_SPEC,
    UPDATE_HOST,
    UPDATE_JOB,
    changed_hosts,
    changed_job,
    event_row,
    host_record,
    host_row,
    job_record,
    new_job_row,
)

_JOBS = Among(
    sa.select(m.jobs, m.job_specs.c.spec).join(m.job_specs, m.job_specs.c.job_id == m.jobs.c.job_id), m.jobs.c.job_id
)
_LOCKED_JOBS = Among(
    sa.select(m.jobs.c.job_id, m.jobs.c.revision).order_by(m.jobs.c.job_id).with_for_update(), m.jobs.c.job_id
)
_OF_KEYS = Among(sa.select(m.jobs.c.job_id, m.jobs.c.idempotency_key), m.jobs.c.idempotency_key)
_HOSTS = Among(sa.select(m.job_hosts).order_by(m.job_hosts.c.job_id, m.job_hosts.c.host_index), m.job_hosts.c.job_id)
_ROW_BYTES = 200  # what a row takes beside its text, about
_TRIES = 5  # of a transaction that a server breaks off
_PAUSE_S = (0.01, 0.1)

Submitted = tuple[JobRecord, str | None, Sequence[Event]]  # a new job, its idempotency key, its first events
T = TypeVar("T")


@cache
def _insert_job(dialect: str) -> sa.Insert:
    return insert_into(m.jobs, dialect).on_conflict_do_nothing(index_elements=["idempotency_key"])


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
        """Waits for no writer, and no writer waits for it. With SQLite all of it is as of one moment, with PostgreSQL
        each query. Raises as ``transaction``."""
        with told_in_words(self._engine.url), self._engine.connect() as connection:
            yield Transaction(connection.execution_options(**{READ_ONLY: True}))

    def apply(self, work: Callable[[Transaction], T]) -> T:
        """The result of ``work``, in a transaction. If the server breaks the transaction off in favour of another one,
        ``work`` is called again: it must change nothing but the database. Raises as ``transaction``."""
        for left in reversed(range(_TRIES)):
            try:
                with self.transaction() as tx:
                    return work(tx)
            except sa.exc.DBAPIError as error:
                if not left or not broken_off(error):
                    raise
            time.sleep(random.uniform(*_PAUSE_S))  # the other one goes first
        raise AssertionError("the last try returns or raises")

    def look(self, work: Callable[[Transaction], T]) -> T:
        """The result of ``work``, which only reads."""
        with self.read() as tx:
            return work(tx)

    def close(self) -> None:
        self._engine.dispose()


class Transaction(NodeQueries):
    # ---- jobs

    def create_job(self, job: JobRecord, idempotency_key: str | None, owner: str, events: Iterable[Event] = ()) -> bool:
        """Writes a new job. False if the key is taken: then nothing was written."""
        return job.job_id in self.create_jobs([(job, idempotency_key, tuple(events))], owner)

    def create_jobs(self, submitted: Sequence[Submitted], owner: str) -> set[str]:
        """Ids of those that were written: all but those whose key is taken."""
        rows = [new_job_row(job, key, owner, len(events)) for job, key, events in submitted]
        # In the order of their keys: two coordinators that get the same ones wait for each other in one direction.
        rows.sort(key=lambda row: row["idempotency_key"] or "")
        self._later(_insert_job(self._db.dialect.name), rows)
        taken = self._others([(job.job_id, key) for job, key, _ in submitted if key is not None])
        written = [one for one in submitted if one[0].job_id not in taken]
        self._later(INSERT_SPEC, [{"job_id": job.job_id, "spec": job.spec.wire} for job, _, _ in written])
        for job, _, _ in written:
            if job.spec.code:
                self.note_job_code(job.job_id, job.spec.code)
        numbered = ((job.job_id, seq, event) for job, _, events in written for seq, event in enumerate(events, 1))
        self._later(INSERT_EVENT, [event_row(*one) for one in numbered])
        return {job.job_id for job, _, _ in written}

    def _others(self, keyed: Sequence[tuple[str, str]]) -> set[str]:
        """Returns those of the jobs whose idempotency key belongs to another job."""
        if not keyed:
            return set()
        rows = self._among(_OF_KEYS, [key for _, key in keyed])
        first = {row.idempotency_key: row.job_id for row in rows}
        return {job_id for job_id, key in keyed if first.get(key) != job_id}

    def job(self, job_id: str) -> JobRecord | None:
        """The job with its hosts and ranks."""
        found = self.stored([job_id])
        return found[0].job if found else None

    def stored(self, job_ids: Sequence[str]) -> list[Stored]:
        """Returns those of the jobs that exist, complete, in the order of ``job_ids``."""
        order = {job_id: place for place, job_id in enumerate(job_ids)}
        rows = [row._mapping for row in self._among(_JOBS, job_ids)]
        rows.sort(key=lambda row: order[row["job_id"]])
        hosts = self._hosts([row["job_id"] for row in rows])
        return [
            Stored(
                job_record(row, tuple(hosts.get(row["job_id"], ()))),
                row["revision"],
                row["last_event"],
                row["lease_owner"],
            )
            for row in rows
        ]

    def job_by_key(self, idempotency_key: str) -> JobRecord | None:
        """The job that was submitted with the key."""
        query = sa.select(m.jobs.c.job_id).where(m.jobs.c.idempotency_key == idempotency_key)
        job_id = self._db.execute(query).scalar_one_or_none()
        return None if job_id is None else self.job(job_id)

    def rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        return self._db.execute(query).all()

    def revision(self, job_id: str) -> int | None:
        """Returns the revision of a job, if there is one."""
        found: int | None = self._db.execute(sa.select(m.jobs.c.revision).where(m.jobs.c.job_id == job_id)).scalar()
        return found

    def live(self) -> dict[str, int]:
        """Job id -> revision of every job that has not ended, or of which something may be left on a node; the oldest
        first."""
        c, h = m.jobs.c, m.job_hosts.c
        unfinished = sa.select(c.created_at, c.job_id, c.revision).where(c.state.in_(UNFINISHED))
        left = sa.select(c.created_at, c.job_id, c.revision).where(
            c.job_id.in_(sa.select(h.job_id).where(h.phase < Phase.STOPPED.value))
        )
        rows = self._db.execute(unfinished.union(left).order_by("created_at", "job_id"))
        return {row.job_id: row.revision for row in rows}

    def job_counts(self) -> dict[JobState, int]:
        query = sa.select(m.jobs.c.state, sa.func.count()).group_by(m.jobs.c.state)
        return {JobState(state): count for state, count in self._db.execute(query)}

    def save(self, changes: Sequence[Change], nodes: Mapping[str, NodeRecord] | None = None) -> set[str]:
        """Writes what differs, and the events, of each change whose job still has the revision that it began with;
        returns the ids of the others, which are stale. ``nodes``: given, with their rows locked, where other
        coordinators place jobs too; a placement that does not fit beside theirs is stale. Placements may take slots
        that other changes give back."""
        rows = self._among(_LOCKED_JOBS, [change.job.job_id for change in changes])  # until the transaction ends
        revisions = {row.job_id: row.revision for row in rows}
        fresh = [change for change in changes if revisions.get(change.job.job_id) == change.old.revision]
        stale = {change.job.job_id for change in changes} - {change.job.job_id for change in fresh}
        placing = [] if nodes is None else [change for change in fresh if change.placed]
        if nodes is not None and placing:
            self._write([change for change in fresh if not change.placed])  # first those that may give slots back
            refused = self._misplaced(placing, nodes)
            fresh = [change for change in placing if change.job.job_id not in refused]
            stale |= refused
        self._write(fresh)
        return stale

    def _write(self, changes: Sequence[Change]) -> None:
        self._later(UPDATE_JOB, [changed_job(change) for change in changes])
        shapes = [(change, reshaped(change.old.job, change.job)) for change in changes]
        regrouped = [change for change, other in shapes if other]
        self._later(DELETE_HOSTS, [{"p_job_id": change.job.job_id} for change in regrouped])
        self._later(
            INSERT_HOST, [host_row(change.job.job_id, host) for change in regrouped for host in change.job.parts]
        )
        self._later(UPDATE_HOST, [row for change, other in shapes if not other for row in changed_hosts(change)])
        numbered = (
            (change.job.job_id, seq, event)
            for change in changes
            for seq, event in enumerate(change.events, change.old.last_event + 1)
        )
        self._later(INSERT_EVENT, [event_row(*one) for one in numbered])

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
        """Deletes jobs with all that belongs to them."""
        self._lock_jobs(m.jobs.c.job_id.in_(job_ids))
        self._db.execute(sa.delete(m.jobs).where(m.jobs.c.job_id.in_(job_ids)))

    def release_jobs(self, owner: str) -> int:
        """Gives back the leases on jobs, so that other coordinators need not wait; returns how many there were."""
        c = m.jobs.c
        held = sa.and_(c.lease_owner == owner, c.state.in_(UNFINISHED))
        self._lock_jobs(held)
        return self._db.execute(
            # So the others read them anew.
            sa.update(m.jobs).where(held).values(lease_owner=None, revision=c.revision + 1)
        ).rowcount

    # ---- helpers

    def _lock_jobs(self, chosen: sa.ColumnElement[bool]) -> None:
        c = m.jobs.c
        self._db.execute(sa.select(c.job_id).where(chosen).order_by(c.job_id).with_for_update()).all()

    def _misplaced(self, placements: Sequence[Change], nodes: Mapping[str, NodeRecord]) -> set[str]:
        """Jobs whose placement does not fit beside others that are stored: too few slots, or a node booted since."""
        wanted = {host.node_id for change in placements for host in change.placed}
        used = self.used_slots(wanted)
        free = {node_id: nodes[node_id].slots - used.get(node_id, 0) for node_id in wanted & nodes.keys()}
        boots = {node_id: nodes[node_id].boot_id for node_id in free}
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

    def _hosts(self, ids: Sequence[str]) -> dict[str, list[HostRecord]]:
        found: dict[str, list[HostRecord]] = {}
        for row in self._among(_HOSTS, ids):
            found.setdefault(row.job_id, []).append(host_record(row._mapping))
        return found
