"""Queries of tuning, for ``store.Transaction``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.execution import LATER, PLAN_ANEW

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

_CHUNK = 500  # bound values in one IN (...)


class Among:
    """``query`` of the rows in which ``column`` is one of some values. Made once for many uses. A server gets one text,
    however many values there are. It plans that anew each time: a plan that it had kept since the table was empty would
    read the whole table, for as long as nothing analyses it."""

    def __init__(self, query: sa.Select[Any], column: sa.Column[Any]) -> None:
        self.of_list = query.where(column.in_(sa.bindparam("wanted", expanding=True)))
        array = sa.bindparam("wanted", type_=sa.ARRAY(sa.String))
        self.of_array = query.where(column == sa.func.any(array)).execution_options(**{PLAN_ANEW: True})


def insert_into(table: sa.Table, dialect: str) -> sqlite.Insert | postgresql.Insert:
    """Returns an INSERT that knows ON CONFLICT."""
    if dialect == "sqlite":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # not worth its time at start where there is SQLite

    return postgresql.insert(table)


class TuningQueries:
    """The part of a transaction that is about jobs that tune themselves, and what all parts need."""

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
