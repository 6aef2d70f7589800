"""Queries of archives of code, for ``store.Transaction``."""

from __future__ import annotations

import sqlalchemy as sa

from bagua.daemon.coordinator.rules.domain import JobState
from bagua.daemon.coordinator.rules.identity import EVERYWHERE
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.tuning_store import TuningQueries

_UNFINISHED = [state.value for state in JobState if not state.terminal]


class CodeQueries(TuningQueries):
    """The part of a transaction that is about archives of code. Times are wall times, seconds."""

    def use_code(self, digest: str, size: int, now: float, namespace: str) -> bool:
        """Marks an archive as used ``now``. True if it is here, whole, and the namespace (*: any) has sent it once."""
        c, g = m.code_archives.c, m.code_grants.c
        here = sa.and_(c.digest == digest, c.bytes == size, c.complete)
        if namespace != EVERYWHERE:
            granted = sa.select(g.digest).where(g.digest == digest, g.namespace == namespace)
            here = sa.and_(here, c.digest.in_(granted))
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

    def code_bytes(self) -> int:
        """Returns the size of all archives together."""
        return int(self._db.execute(sa.select(sa.func.coalesce(sa.func.sum(m.code_archives.c.bytes), 0))).scalar_one())

    def idle_code(self, used_before: float) -> list[tuple[str, int]]:
        """Digest and bytes of those that no unfinished job needs, and that were not used since; the oldest first."""
        c = m.code_archives.c
        needed = (
            sa.select(m.job_code.c.digest)
            .join(m.jobs, m.jobs.c.job_id == m.job_code.c.job_id)
            .where(m.jobs.c.state.in_(_UNFINISHED))
        )
        query = sa.select(c.digest, c.bytes).where(c.used_at < used_before, c.digest.not_in(needed)).order_by(c.used_at)
        return [(row.digest, row.bytes) for row in self._db.execute(query)]

    def forget_code(self, digest: str) -> None:
        """Deletes an archive with its pieces."""
        self._db.execute(sa.delete(m.code_archives).where(m.code_archives.c.digest == digest))
