"""Queries of accounts and of the audit log, for ``store.Transaction``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from bagua.daemon.coordinator.rules.access import Owned
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.code_store import CodeQueries


class AccountQueries(CodeQueries):
    """The part of a transaction that is about who may do what. Times are wall times, seconds."""

    def tokens(self) -> Sequence[sa.Row[Any]]:
        """Returns all tokens, the oldest first."""
        return self._db.execute(sa.select(m.tokens).order_by(m.tokens.c.created_at, m.tokens.c.token_id)).all()

    def add_token(self, row: Mapping[str, Any]) -> None:
        self._db.execute(sa.insert(m.tokens).values(row))

    def revoke_tokens(self, token_ids: Sequence[str], now: float) -> None:
        """Revokes tokens."""
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
        chosen = sa.select(c.seq).where(old).order_by(c.seq).limit(limit).with_for_update(skip_locked=True)
        return self._db.execute(sa.delete(m.audit).where(c.seq.in_(chosen))).rowcount
