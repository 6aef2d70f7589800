"""Lists jobs and nodes page by page, without reading specifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from bagua.base.errors import ConflictError, InvalidRequestError, NotFoundError
from bagua.daemon.coordinator.rules.domain import JobState
from bagua.daemon.coordinator.rules.identity import EVERYWHERE
from bagua.daemon.coordinator.rules.translate import summary_message
from bagua.daemon.coordinator.store import models as m
from bagua.daemon.coordinator.store.store import Transaction
from bagua.proto import job_pb2

MAX_PAGE = 1_000
_DEFAULT_PAGE = 100
_CANDIDATES = 5  # of an ambiguous prefix are named

Item = TypeVar("Item")


def jobs(
    tx: Transaction, states: Sequence[JobState], limit: int, page_token: str, namespace: str = EVERYWHERE
) -> tuple[list[job_pb2.Job], str]:
    """The next jobs of a namespace in one of ``states`` (none: all), the newest first, and the token of the next
    page (empty: no more). Raises InvalidRequestError for a token that is none."""
    c = m.jobs.c
    size = min(limit or _DEFAULT_PAGE, MAX_PAGE)
    about = (c.job_id, c.brief, c.state, c.reason, c.generation, c.namespace, c.submitted_by, c.unix_user)
    times = (c.created_at, c.started_at, c.finished_at)
    # One more shows that there is a next page.
    query = sa.select(*about, *times).order_by(c.created_at.desc(), c.job_id.desc()).limit(size + 1)
    if namespace != EVERYWHERE:
        query = query.where(c.namespace == namespace)
    if states:
        query = query.where(c.state.in_([state.value for state in states]))
    if page_token:
        created_at, job_id = _parse(page_token)
        older = sa.and_(c.created_at == created_at, c.job_id < job_id)
        # The first condition is for the index.
        query = query.where(c.created_at <= created_at, sa.or_(c.created_at < created_at, older))
    rows = tx.rows(query)
    found = [summary_message(row._mapping) for row in rows[:size]]
    last = found[-1] if len(rows) > size else None
    return found, f"{last.created_at.hex()}:{last.job_id}" if last else ""  # hex: a float comes back as it was


def find(tx: Transaction, prefix: str, namespace: str = EVERYWHERE) -> str:
    """The id of the one job of a namespace that has ``prefix`` as its id, or at its beginning. Raises
    NotFoundError, and ConflictError that names candidates."""
    c = m.jobs.c
    if not prefix or len(prefix) > 64 or "\0" in prefix:
        raise NotFoundError(f"{prefix[:64]!r} is not the id of a job. `bagua job list` shows those there are. [BG810]")
    seen = sa.true() if namespace == EVERYWHERE else c.namespace == namespace
    found = tx.rows(sa.select(c.job_id).where(c.job_id == prefix, seen))
    if not found:  # by characters: how databases compare texts depends on their settings
        query = sa.select(c.job_id).where(sa.func.substr(c.job_id, 1, len(prefix)) == prefix, seen)
        found = tx.rows(query.order_by(c.job_id).limit(_CANDIDATES + 1))
    if not found:
        raise NotFoundError(f"There is no job {prefix!r}. `bagua job list` shows those there are. [BG810]")
    if len(found) > 1:
        several = f"more than {_CANDIDATES}" if len(found) > _CANDIDATES else str(len(found))
        names = ", ".join(row.job_id for row in found[:_CANDIDATES])
        raise ConflictError(f"{prefix!r} is the beginning of {several} jobs: {names}. Give more of the id. [BG811]")
    return str(found[0].job_id)


def page(items: Sequence[Item], key: Callable[[Item], str], limit: int, page_token: str) -> tuple[list[Item], str]:
    """The next of ``items``, in order of ``key``, and the token of the next page (empty: no more)."""
    rest = sorted((item for item in items if key(item) > page_token), key=key)
    size = min(limit or MAX_PAGE, MAX_PAGE)
    return rest[:size], key(rest[size - 1]) if len(rest) > size else ""


def _parse(page_token: str) -> tuple[float, str]:
    time, _, job_id = page_token.partition(":")
    try:
        return float.fromhex(time), job_id.replace("\0", "")
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError("page_token is none that this coordinator has given. [BG820]") from error
