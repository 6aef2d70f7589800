"""Checks a coordinator's database: whether it is whole, of which version, and whether its rows fit together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import sqlalchemy as sa
from google.protobuf.message import DecodeError

import bagua
from bagua.base import code_archive
from bagua.daemon.coordinator.rules.domain import JobState, Phase
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.database import config_words, connect_engine, revision_of
from bagua.daemon.coordinator.store.execution import READ_ONLY
from bagua.daemon.coordinator.store.migrations import HEAD, KNOWN, maker
from bagua.proto import common_pb2

_MOST = 100  # problems that are told
_ROWS = 500  # in memory at once


@dataclass(frozen=True)
class Report:
    """``schema``: the revision, empty if there is none. ``problems``: each in words; the first hundred."""

    schema: str
    jobs: dict[str, int]
    events: int
    problems: tuple[str, ...]

    @property
    def line(self) -> str:
        """Summary in a few words."""
        states = ", ".join(f"{count} {state}" for state, count in self.jobs.items())
        note = "" if self.schema == HEAD else f" (this version has {HEAD}: a start brings it there)"
        jobs = sum(self.jobs.values())
        return f"schema {self.schema}{note}, {jobs} jobs{f' ({states})' if states else ''}, {self.events} events"


def check_database(url: str) -> Report:
    """Reads all of it, as of one moment, beside coordinators that run. Raises ConfigError if it can't be read."""
    engine = connect_engine(url)
    try:
        with config_words(engine.url), _snapshot(engine) as connection:
            revision = revision_of(connection) or ""
            problems = tuple(islice(_problems(connection, revision), _MOST))
            return Report(revision, _states(connection), count_rows(connection, "events"), problems)
    finally:
        engine.dispose()


def _problems(db: sa.Connection, revision: str) -> Iterator[str]:
    found = [*_storage(db)]
    if revision not in KNOWN:
        found.append(_unknown(revision))
    elif revision == HEAD:
        found += _columns(db)
    yield from found
    if not found and revision == HEAD:  # the rows of older versions have other rules
        for part in (_jobs, _events, _hosts, _code, _slots):
            yield from part(db)


def _snapshot(engine: sa.Engine) -> sa.Connection:
    connection = engine.connect()
    if engine.dialect.name == "sqlite":
        return connection.execution_options(**{READ_ONLY: True})
    return connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _unknown(revision: str) -> str:
    if not revision:
        return "there is no schema version: this is not a coordinator's database, or an empty one"
    return f"schema {revision} is not known to bagua {bagua.__version__}: {maker(revision)} made it"


def _storage(db: sa.Connection) -> Iterator[str]:
    """The pages and references of SQLite. PostgreSQL looks after its own: see its checksums and pg_amcheck."""
    if db.dialect.name != "sqlite":
        return
    for (words,) in db.exec_driver_sql("PRAGMA integrity_check(20)").all():
        if words != "ok":
            yield f"the file is damaged: {words}"
    for table, row, parent, _ in db.exec_driver_sql("PRAGMA foreign_key_check").all():
        yield f"row {row} of table {table} belongs to a row of {parent} that is not there"


def _columns(db: sa.Connection) -> Iterator[str]:
    inspector = sa.inspect(db)
    there = set(inspector.get_table_names())
    for table in m.metadata.sorted_tables:
        if table.name not in there:
            yield f"the table {table.name} is missing"
            continue
        has = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in has:
                yield f"the column {column.name} of table {table.name} is missing"


def count_rows(db: sa.Connection, table: str) -> int:
    if not sa.inspect(db).has_table(table):
        return 0
    return int(db.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one())


def _states(db: sa.Connection) -> dict[str, int]:
    if not sa.inspect(db).has_table("jobs"):
        return {}
    rows = db.execute(sa.text("SELECT state, count(*) AS n FROM jobs GROUP BY state ORDER BY state")).all()
    known = {state.value: state.name for state in JobState}
    return {known.get(state, f"state {state}"): count for state, count in rows}


# ---- rows that must fit together


def _jobs(db: sa.Connection) -> Iterator[str]:
    query = sa.select(m.jobs, m.job_specs.c.spec).outerjoin(m.job_specs, m.job_specs.c.job_id == m.jobs.c.job_id)
    for row in _stream(db, query):
        who = f"job {row.job_id}"
        if row.state not in {state.value for state in JobState}:
            yield f"{who} is in state {row.state}, which there is not"
            continue
        ended = JobState(row.state).terminal
        if ended != (row.finished_at > 0):
            yield f"{who} is {JobState(row.state).name}, and its end is {'not ' if ended else ''}written down"
        if row.revision < 1 or row.last_event < 0:
            yield f"{who} has revision {row.revision} and {row.last_event} events"
        if row.spec is None or not _parses(row.spec):
            yield f"{who} has no specification that can be read"


def _parses(wire: bytes) -> bool:
    try:
        common_pb2.JobSpec.FromString(wire)
    except DecodeError:
        return False
    return True


def _events(db: sa.Connection) -> Iterator[str]:
    """Checks that events of each job are numbered from 1, without a gap, up to the last one that the job knows."""
    c = m.events.c
    counted = (
        sa.select(
            c.job_id, sa.func.count().label("n"), sa.func.min(c.seq).label("low"), sa.func.max(c.seq).label("top")
        )
        .group_by(c.job_id)
        .subquery()
    )
    join = m.jobs.outerjoin(counted, counted.c.job_id == m.jobs.c.job_id)
    query = sa.select(m.jobs.c.job_id, m.jobs.c.last_event, counted.c.n, counted.c.low, counted.c.top).select_from(join)
    for row in _stream(db, query):
        count = row.n or 0
        if count != row.last_event or (count and (row.low != 1 or row.top != count)):
            yield f"job {row.job_id} says that it has {row.last_event} events, and {count} are there"


def _hosts(db: sa.Connection) -> Iterator[str]:
    query = sa.select(m.job_hosts).order_by(m.job_hosts.c.job_id, m.job_hosts.c.host_index)
    for job_id, rows in groupby(_stream(db, query), key=lambda row: row.job_id):
        hosts = list(rows)
        current = [host for host in hosts if host.host_index >= 0]
        if [host.host_index for host in current] != list(range(len(current))):
            yield f"the hosts of job {job_id} are not numbered from 0 without a gap"
        first = 0
        for host in current:
            if host.first_rank != first:
                yield f"host {host.host_index} of job {job_id} begins with rank {host.first_rank}, not {first}"
            first = host.first_rank + host.nranks
        for host in hosts:
            if host.phase not in {phase.value for phase in Phase}:
                yield f"host {host.host_index} of job {job_id} is in phase {host.phase}, which there is not"
            if host.ranks and len(_list(host.ranks)) != host.nranks:
                yield f"host {host.host_index} of job {job_id} has other ranks than the {host.nranks} that it says"


def _list(text: str) -> list[Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _code(db: sa.Connection) -> Iterator[str]:
    a, p = m.code_archives.c, m.code_pieces.c
    pieces = sa.select(p.digest, sa.func.count().label("n"), sa.func.sum(sa.func.length(p.data)).label("size"))
    counted = pieces.group_by(p.digest).subquery()
    join = m.code_archives.outerjoin(counted, counted.c.digest == a.digest)
    query = sa.select(a.digest, a.bytes, counted.c.n, counted.c.size).select_from(join).where(a.complete)
    for row in _stream(db, query):
        if (row.n or 0) != code_archive.pieces_of(row.bytes) or (row.size or 0) != row.bytes:
            yield f"the archive of code {row.digest[:12]} is not whole: {row.size or 0} of {row.bytes} bytes are there"


def _slots(db: sa.Connection) -> Iterator[str]:
    """Checks that no node has more ranks than slots."""
    h, n = m.job_hosts.c, m.nodes.c
    query = (
        sa.select(h.node_id, n.slots, sa.func.sum(h.nranks).label("used"))
        # With the same run of the daemon: ranks of an earlier one died with it.
        .join(m.nodes, sa.and_(n.node_id == h.node_id, n.boot_id == h.boot_id))
        .where(h.phase < Phase.STOPPED.value)  # ranks that have stopped hold no slots
        .group_by(h.node_id, n.slots)
    )
    for row in _stream(db, query):
        if row.used > row.slots:
            yield f"node {row.node_id} has {row.slots} slots, and {row.used} of them are taken"


def _stream(db: sa.Connection, query: sa.Select[Any]) -> Iterator[sa.Row[Any]]:
    yield from db.execution_options(yield_per=_ROWS).execute(query)
