"""Queries of use cases, for ``store.Transaction``: tuning, archives of code, accounts and the audit log. Times are wall
times, seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from bagua.daemon.coordinator.rules.access import Owned
from bagua.daemon.coordinator.rules.domain import JobState
from bagua.daemon.coordinator.rules.identity import EVERYWHERE
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.execution import LATER

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

_CHUNK = 500  # bound values in one IN (...)
UNFINISHED = [state.value for state in JobState if not state.terminal]


class Among:
    """``query`` of the rows in which ``column`` is one of some values. Made once for many uses. A server gets one text,
    however many values there are."""

    def __init__(self, query: sa.Select[Any], column: sa.Column[Any]) -> None:
        self.of_list = query.where(column.in_(sa.bindparam("wanted", expanding=True)))
        array = sa.bindparam("wanted", type_=sa.ARRAY(sa.String))
        self.of_array = query.where(column == sa.func.any(array))


def insert_into(table: sa.Table, dialect: str) -> sqlite.Insert | postgresql.Insert:
    """Returns an INSERT that knows ON CONFLICT."""
    if dialect == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # not worth its time at start where there is SQLite

    return postgresql.insert(table)


def _sent_by(namespace: str) -> sa.ColumnElement[bool]:
    """Archives that the namespace has sent; *: all."""
    g = m.code_grants.c
    granted = sa.select(g.digest).where(g.namespace == namespace)
    return sa.true() if namespace == EVERYWHERE else m.code_archives.c.digest.in_(granted)


class UseQueries:
    """The part of a transaction that is about use cases, and what all parts need."""

    def __init__(self, connection: sa.Connection) -> None:
        self._db = connection

    def _insert(self, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
        return insert_into(table, self._db.dialect.name)

    def _later(
        self, statement: sa.Executable, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Runs a statement once, or once for each of the rows. A server is asked the next thing without waiting for
        this answer.
        """
        if rows is None or rows:
            self._db.execute(statement, rows, execution_options={LATER: True})

    def _among(self, query: Among, values: Iterable[str]) -> list[sa.Row[Any]]:
        """The rows that it finds for these values."""
        wanted = sorted(set(values))
        if self._db.dialect.name != "sqlite":
            return list(self._db.execute(query.of_array, {"wanted": wanted})) if wanted else []
        parts = (wanted[start : start + _CHUNK] for start in range(0, len(wanted), _CHUNK))
        return [row for part in parts for row in self._db.execute(query.of_list, {"wanted": part})]

    # ---- tuning

    def tune_study(self, study_id: str) -> sa.Row[Any] | None:
        return self._db.execute(sa.select(m.tune_studies).where(m.tune_studies.c.study_id == study_id)).one_or_none()

    def put_tune_study(self, row: Mapping[str, Any]) -> None:
        """Writes a study, in the place of the one with this id."""
        new = {name: value for name, value in row.items() if name != "study_id"}
        statement = self._insert(m.tune_studies).values(row)
        self._db.execute(statement.on_conflict_do_update(index_elements=["study_id"], set_=new))

    def add_tune_trial(self, study_id: str, job_id: str, number: int, time: float, trial: bytes) -> None:
        """Adds a trial, unless it is there."""
        values = {"study_id": study_id, "job_id": job_id, "number": number, "time": time, "trial": trial}
        self._db.execute(self._insert(m.tune_trials).values(values).on_conflict_do_nothing())

    def tune_trials(self, study_id: str, limit: int) -> list[bytes]:
        """The newest, in their order."""
        c = m.tune_trials.c
        query = sa.select(c.trial).where(c.study_id == study_id).order_by(c.time.desc(), c.number.desc()).limit(limit)
        return [bytes(row.trial) for row in reversed(self._db.execute(query).all())]

    def forget_tune_studies(self, study_ids: Sequence[str]) -> None:
        """Deletes studies with their trials."""
        for study_id in study_ids:
            self._db.execute(sa.delete(m.tune_studies).where(m.tune_studies.c.study_id == study_id))

    # ---- archives of code

    def use_code(self, digest: str, size: int, now: float, namespace: str) -> bool:
        """Marks an archive as used ``now``. True if it is here, whole, and the namespace (*: any) has sent it once."""
        c = m.code_archives.c
        here = sa.and_(c.digest == digest, c.bytes == size, c.complete, _sent_by(namespace))
        # One statement: a look and a mark.
        found = self._db.execute(sa.update(m.code_archives).where(here).values(used_at=now))
        return found.rowcount > 0

    def begin_code(self, digest: str, size: int, now: float) -> None:
        """Begins an archive whose pieces follow. Does nothing if it was begun before: the pieces are the same."""
        values = {"digest": digest, "bytes": size, "complete": False, "used_at": now}
        statement = self._insert(m.code_archives).values(values)
        self._db.execute(statement.on_conflict_do_update(index_elements=["digest"], set_={"used_at": now}))

    def add_code_piece(self, digest: str, number: int, data: bytes) -> None:
        """Adds a piece, unless it is there."""
        statement = self._insert(m.code_pieces).values(digest=digest, number=number, data=data)
        self._db.execute(statement.on_conflict_do_nothing())

    def complete_code(self, digest: str, now: float, namespace: str) -> None:
        """Notes that all pieces are there, and that the namespace has sent them."""
        grant = self._insert(m.code_grants).values(digest=digest, namespace=namespace)
        self._db.execute(grant.on_conflict_do_nothing())
        here = m.code_archives.c.digest == digest
        self._db.execute(sa.update(m.code_archives).where(here).values(complete=True, used_at=now))

    def note_job_code(self, job_id: str, digest: str) -> None:
        """Notes that the job needs the archive."""
        self._db.execute(sa.insert(m.job_code).values(job_id=job_id, digest=digest))

    def code_piece(self, job_id: str, number: int) -> bytes | None:
        """A piece of what the job needs."""
        pieces, jobs = m.code_pieces.c, m.job_code.c
        query = sa.select(pieces.data).where(
            pieces.digest == jobs.digest, jobs.job_id == job_id, pieces.number == number
        )
        found = self._db.execute(query).scalar_one_or_none()
        return None if found is None else bytes(found)

    def code_bytes(self, namespace: str = EVERYWHERE) -> int:
        """Returns the size of all archives together that a namespace (*: any) has sent."""
        total = sa.select(sa.func.coalesce(sa.func.sum(m.code_archives.c.bytes), 0))
        return int(self._db.execute(total.where(_sent_by(namespace))).scalar_one())

    def idle_code(self, used_before: float, namespace: str = EVERYWHERE) -> list[tuple[str, int]]:
        """Digest and bytes of those of a namespace (*: any) that no unfinished job needs, and that were not used since;
        the oldest first."""
        c = m.code_archives.c
        needed = (
            sa.select(m.job_code.c.digest)
            .join(m.jobs, m.jobs.c.job_id == m.job_code.c.job_id)
            .where(m.jobs.c.state.in_(UNFINISHED))
        )
        query = sa.select(c.digest, c.bytes).where(c.used_at < used_before, c.digest.not_in(needed))
        query = query.where(_sent_by(namespace)).order_by(c.used_at)
        return [(row.digest, row.bytes) for row in self._db.execute(query)]

    def forget_code(self, digest: str) -> None:
        self._db.execute(sa.delete(m.code_archives).where(m.code_archives.c.digest == digest))

    # ---- accounts

    def tokens(self) -> Sequence[sa.Row[Any]]:
        """Returns all tokens, the oldest first."""
        return self._db.execute(sa.select(m.tokens).order_by(m.tokens.c.created_at, m.tokens.c.token_id)).all()

    def add_token(self, row: Mapping[str, Any]) -> None:
        self._db.execute(sa.insert(m.tokens).values(row))

    def revoke_tokens(self, token_ids: Sequence[str], now: float) -> None:
        chosen = sa.and_(m.tokens.c.token_id.in_(token_ids), m.tokens.c.revoked_at == 0)
        self._db.execute(sa.update(m.tokens).where(chosen).values(revoked_at=now))

    def owned(self, job_id: str) -> Owned | None:
        """Returns where a job belongs; None if there is no such job."""
        query = sa.select(m.jobs.c.namespace, m.jobs.c.submitted_by).where(m.jobs.c.job_id == job_id)
        found = self._db.execute(query).one_or_none()
        return None if found is None else Owned(found.namespace, found.submitted_by)

    # ---- audit

    def add_audit(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows in this order. The commit of PostgreSQL does not wait for the disk: a server that crashes loses the
        last rows.
        """
        if self._db.dialect.name == "postgresql":
            self._later(sa.text("SET LOCAL synchronous_commit TO OFF"))
        # Inline: for one row alone SQLAlchemy asks for its number else, and nobody waits for that answer.
        self._later(sa.insert(m.audit).inline(), [dict(row) for row in rows])

    def audit(
        self, limit: int, before_seq: int = 0, who: str = "", target: str = "", refused: bool = False
    ) -> Sequence[sa.Row[Any]]:
        """Entries that fit, the newest first."""
        c = m.audit.c
        query = sa.select(m.audit).order_by(c.seq.desc()).limit(limit)
        if before_seq:
            query = query.where(c.seq < before_seq)
        if who:
            query = query.where(c.who == who)
        if target:
            query = query.where(c.target == target)
        if refused:
            query = query.where(c.outcome != "OK")
        return self._db.execute(query).all()

    def trim_audit(self, before: float, keep: int, limit: int) -> int:
        """Deletes entries from before that time, or beyond the ``keep`` newest; ``limit`` at most. Returns how many."""
        c = m.audit.c
        last = self._db.execute(sa.select(sa.func.max(c.seq))).scalar() or 0
        old = sa.or_(c.time < before, c.seq <= last - keep)
        # Another coordinator may be at it.
        chosen = sa.select(c.seq).where(old).order_by(c.seq).limit(limit).with_for_update(skip_locked=True)
        return self._db.execute(sa.delete(m.audit).where(c.seq.in_(chosen))).rowcount
