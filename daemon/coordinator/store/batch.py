"""Writes the results of one round, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import sqlalchemy as sa
import structlog

from bagua.base.errors import ConflictError, ServiceError
from bagua.daemon.coordinator.rules.domain import Change, CoordinatorRecord, Event, JobRecord, NodeRecord
from bagua.daemon.coordinator.store.store import Store, Transaction

# Errors of the database or of the machine. Any other is one of the part that is being written.
_FOR_ALL = (sa.exc.OperationalError, sa.exc.InterfaceError, ServiceError, MemoryError)

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
    announced: CoordinatorRecord | None = None  # what others are told of this coordinator, if that is new

    def __bool__(self) -> bool:
        return any((self.submissions, self.introductions, self.gone, self.marks, self.changes))

    def write(self, store: Store) -> Outcome:
        """Writes all of it, or nothing and raises. A part that can't be written does not take the others along: its
        error is in the outcome."""
        try:
            return store.apply(self._put)
        except _FOR_ALL:
            raise
        except Exception as error:
            parts = self._parts()
            log.error("batch_refused", parts=len(parts), error=str(error))
            return self._write_each(store, parts)

    def _put(self, tx: Transaction) -> Outcome:
        outcome = Outcome()
        tx.beat(self.owner, self.clock)  # also keeps the service clock: no stored time is ahead of it
        if self.announced is not None:
            tx.announce(self.announced)
        # All nodes at once, before anything else: whoever else writes locks them in the same order.
        nodes = tx.lock_nodes(self._touched()) if self.lives is not None else None
        tx.disconnect_nodes(self.gone, self.owner, self.wall)
        tx.put_nodes(self._introduced(nodes, outcome))
        for mark in self.marks:
            tx.mark_node(*mark)
        if self.submissions:
            self._submit(tx, outcome)
        if self.changes:
            outcome.stale |= tx.save(self.changes, nodes)
        return outcome

    def _touched(self) -> set[str]:
        """Returns the ids of nodes that the batch changes."""
        placed = (host.node_id for change in self.changes for host in change.placed)
        introduced = (node.node_id for node in self.introductions)
        return {*self.gone, *introduced, *(mark[0] for mark in self.marks), *placed}

    def _introduced(self, nodes: dict[str, NodeRecord] | None, outcome: Outcome) -> list[NodeRecord]:
        """Returns introductions that nobody refuses. ``nodes`` then has them as they will be."""
        found: list[NodeRecord] = []
        for node in self.introductions:
            known = None if nodes is None else nodes.get(node.node_id)
            if known is not None and self._elsewhere(known, node):
                outcome.failed[node.node_id] = in_use(node.node_id, known.hostname)
                continue
            found.append(replace(node, owner=self.owner, last_seen=self.wall))
        if nodes is not None:
            nodes.update({node.node_id: node for node in found})
        return found

    def _elsewhere(self, known: NodeRecord, node: NodeRecord) -> bool:
        """True if another daemon with the id has a session with another coordinator that lives."""
        if known.boot_id == node.boot_id or known.owner in (None, self.owner):
            return False
        return self.lives is not None and self.lives(str(known.owner))

    def _submit(self, tx: Transaction, outcome: Outcome) -> None:
        submitted = []
        for job, key in self.submissions:
            event = Event("submitted", f"{job.spec.nnodes} x {job.spec.nproc_per_node} ranks", 0, job.created_at)
            submitted.append((job, key or None, [event]))
        written = tx.create_jobs(submitted, self.owner)
        outcome.created = dict.fromkeys(written, 1)
        for job, key in self.submissions:
            if job.job_id in written:
                continue
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
                outcome = store.apply(part._put)
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
    """Returns the error for two daemons with one id."""
    return ConflictError(
        f"The node id {node_id!r} is in use by another daemon, on {hostname}. Give each daemon a state folder or "
        "--node-id of its own. [BG811]"
    )
