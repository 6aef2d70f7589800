"""Writes the results of one round, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import sqlalchemy as sa
import structlog

from bagua.base.errors import ConflictError, ServiceError
from bagua.daemon.coordinator.domain import Change, Event, JobRecord, NodeRecord
from bagua.daemon.coordinator.store import Store, Transaction

_FOR_ALL = (sa.exc.OperationalError, sa.exc.InterfaceError, ServiceError, MemoryError)
"""Errors of the database or of the machine. Any other is one of the part that is being written."""

log = structlog.get_logger("coordinator.batch")


@dataclass
class Outcome:
    """The result of a batch. ``failed`` by job or node: an error of that part alone."""

    created: dict[str, int] = field(default_factory=dict)  # new job -> its number of events
    first: dict[str, JobRecord] = field(default_factory=dict)  # idempotency key -> the job that had it before
    stale: set[str] = field(default_factory=set)  # jobs that another coordinator has changed: nothing was written
    failed: dict[str, Exception] = field(default_factory=dict)


@dataclass
class Batch:
    """``lives`` tells whether another coordinator lives; None: there can be none."""

    owner: str
    clock: float
    wall: float
    submissions: list[tuple[JobRecord, str]] = field(default_factory=list)
    introductions: list[NodeRecord] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # nodes; before introductions, which may be of the same nodes
    marks: list[tuple[str, bool | None, bool | None]] = field(default_factory=list)  # nodes that drain, or not
    changes: list[Change] = field(default_factory=list)
    lives: Callable[[str], bool] | None = None

    def __bool__(self) -> bool:
        return any((self.submissions, self.introductions, self.gone, self.marks, self.changes))

    def write(self, store: Store) -> Outcome:
        """All of it, or nothing and an exception. A part that can't be written does not take the others along: its
        error is in the outcome."""
        try:
            return self._write(store)
        except _FOR_ALL:
            raise
        except Exception as error:
            parts = self._parts()
            log.error("batch_refused", parts=len(parts), error=str(error))
            return self._write_each(store, parts)

    def _write(self, store: Store) -> Outcome:
        outcome = Outcome()
        with store.transaction() as tx:
            tx.beat(self.owner, self.clock)  # also keeps the service clock: no stored time is ahead of it
            for node_id in self.gone:
                tx.disconnect_node(node_id, self.owner, self.wall)
            for node in self.introductions:
                self._introduce(tx, node, outcome)
            for mark in self.marks:
                tx.mark_node(*mark)
            for job, key in self.submissions:
                self._submit(tx, job, key, outcome)
            if self.changes:
                outcome.stale |= tx.save(self.changes, check_slots=self.lives is not None)
        return outcome

    def _introduce(self, tx: Transaction, node: NodeRecord, outcome: Outcome) -> None:
        if self.lives is not None:
            known = tx.node(node.node_id, lock=True)
            if known is not None and known.boot_id != node.boot_id and known.owner not in (None, self.owner):
                if self.lives(str(known.owner)):
                    outcome.failed[node.node_id] = in_use(node.node_id, known.hostname)
                    return
        tx.put_node(replace(node, owner=self.owner, last_seen=self.wall))

    def _submit(self, tx: Transaction, job: JobRecord, key: str, outcome: Outcome) -> None:
        event = Event("submitted", f"{job.spec.nnodes} x {job.spec.nproc_per_node} ranks", 0, job.created_at)
        if tx.create_job(job, key or None, self.owner, [event]):
            outcome.created[job.job_id] = 1
            return
        first = tx.job_by_key(key)
        if first is None:
            text = f"idempotency_key {key!r} is being used by another call; try again."
            outcome.failed[job.job_id] = ConflictError(f"{text} [BG811]")
        else:
            outcome.first[key] = first

    def _parts(self) -> list[tuple[str, Batch]]:
        alone = replace(self, submissions=[], introductions=[], gone=[], marks=[], changes=[])
        return [
            *((node_id, replace(alone, gone=[node_id])) for node_id in self.gone),
            *((node.node_id, replace(alone, introductions=[node])) for node in self.introductions),
            *((mark[0], replace(alone, marks=[mark])) for mark in self.marks),
            *((call[0].job_id, replace(alone, submissions=[call])) for call in self.submissions),
            *((change.job.job_id, replace(alone, changes=[change])) for change in self.changes),
        ]

    def _write_each(self, store: Store, parts: list[tuple[str, Batch]]) -> Outcome:
        whole = Outcome()
        for name, part in parts:
            try:
                outcome = part._write(store)
            except _FOR_ALL:
                raise
            except Exception as error:
                log.error("not_written_at_all", part=name, exc_info=error)
                whole.failed[name] = error
                continue
            whole.created |= outcome.created
            whole.first |= outcome.first
            whole.stale |= outcome.stale
            whole.failed |= outcome.failed
        return whole


def in_use(node_id: str, hostname: str) -> ConflictError:
    """Two daemons with one id."""
    return ConflictError(
        f"The node id {node_id!r} is in use by another daemon, on {hostname}. Give each daemon a state folder or "
        "--node-id of its own. [BG811]"
    )
