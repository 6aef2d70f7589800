"""Use cases, one transaction each. Synchronous: the caller runs them off the event loop.

A use case returns what changed; telling nodes and watchers is the caller's work, after the transaction.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bagua.base.errors import ConflictError, InvalidRequestError, NotFoundError
from bagua.daemon.coordinator.decide import apply, decide
from bagua.daemon.coordinator.domain import (
    Event,
    JobRecord,
    JobSpec,
    JobState,
    LocalJob,
    NodeRecord,
    NodeView,
    Options,
    Phase,
)
from bagua.daemon.coordinator.observe import Changed, forget, observe
from bagua.daemon.coordinator.store import StaleError, Store, Transaction

MAX_EVENTS = 1_000  # in one answer
_PORTS = range(20_000, 32_000)  # below the ports that kernels give to clients


@dataclass(frozen=True)
class Reconciled:
    """A job after a look at it. ``mine``: this coordinator holds the lease and may decide."""

    job: JobRecord
    changed: bool
    mine: bool
    wake_at: float | None = None


@dataclass(frozen=True)
class Observed:
    """What a fact changed. ``unknown``: the database has no such job or generation."""

    changed: bool = False
    freed: bool = False  # slots became free
    unknown: bool = False


class Service:
    """``owner`` names this coordinator in leases and sessions; it survives a restart on the same state folder."""

    def __init__(
        self, store: Store, owner: str, options: Options, clock: Callable[[], float], job_lease_s: float
    ) -> None:
        self._store = store
        self._owner = owner
        self._options = options
        self._clock = clock
        self._job_lease_s = job_lease_s

    @property
    def shared(self) -> bool:
        """True if other coordinators may work on the same database."""
        return self._store.shared

    def start(self) -> dict[str, int]:
        """Drops what a former run of this coordinator held; returns unfinished jobs with their revisions."""
        with self._store.transaction() as tx:
            tx.disconnect_all(self._owner)
            return tx.unfinished()

    def stop(self) -> None:
        """Gives back what this coordinator holds."""
        with self._store.transaction() as tx:
            tx.disconnect_all(self._owner)
            tx.release_leases(self._owner)

    # ---- jobs

    def submit(self, spec: JobSpec, idempotency_key: str) -> JobRecord:
        """A new job, or the one that was submitted with the same key."""
        if len(idempotency_key) > 200 or "\0" in idempotency_key:
            raise InvalidRequestError("idempotency_key: 200 characters at most, no NUL.")
        now = self._clock()
        with self._store.transaction() as tx:
            job = JobRecord(
                job_id=f"job-{secrets.token_hex(5)}",
                spec=spec,
                created_at=now,
                reason="submitted",
                master_port=spec.master_port or _free_port(tx),
                job_key=secrets.token_bytes(32),
            )
            if not tx.create_job(job, idempotency_key or None):
                first = tx.job_by_key(idempotency_key)
                if first is None:
                    raise ConflictError(
                        f"idempotency_key {idempotency_key!r} is being used by another call; try again."
                    )
                return first
            tx.save_job(job, job, [Event("submitted", f"{spec.nnodes} x {spec.nproc_per_node} ranks", 0, now)])
            return job

    def job(self, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        with self._store.transaction() as tx:
            return _found(tx, job_id)

    def events(self, job_id: str, after_seq: int) -> list[Event]:
        """The next events of a job. Raises NotFoundError."""
        with self._store.transaction() as tx:
            _found(tx, job_id)
            return tx.events(job_id, after_seq, MAX_EVENTS)

    def job_and_events(self, job_id: str, after_seq: int) -> tuple[JobRecord, list[Event]]:
        """Both as of one moment. Raises NotFoundError."""
        with self._store.transaction() as tx:
            return _found(tx, job_id), tx.events(job_id, after_seq, MAX_EVENTS)

    def cancel(self, job_id: str, reason: str) -> JobRecord:
        """Asks for the end of a job; one that ends or has ended stays as it is. Raises NotFoundError."""
        now = self._clock()
        with self._store.transaction() as tx:
            job = _found(tx, job_id, lock=True)
            if job.state.terminal or job.state is JobState.STOPPING or job.cancel_reason is not None:
                return job
            text = reason.replace("\0", "").strip()[:2_000]
            new = replace(job, cancel_reason=f"cancelled: {text}" if text else "cancelled")
            tx.save_job(job, new, [Event("cancel_requested", new.cancel_reason or "", job.generation, now)])
            return new

    def reconcile(self, job_id: str) -> Reconciled | None:
        """Decides about one job, if this coordinator holds its lease. None: no such job, or somebody was faster."""
        now = self._clock()
        try:
            with self._store.transaction() as tx:
                return self._reconcile(tx, job_id, now)
        except StaleError:
            return None

    def _reconcile(self, tx: Transaction, job_id: str, now: float) -> Reconciled | None:
        mine = tx.acquire_lease(job_id, self._owner, now, now + self._job_lease_s)
        job = tx.job(job_id)
        if job is None:
            return None
        if job.state.terminal or not mine:
            if mine:
                tx.release_lease(job_id, self._owner)
            return Reconciled(job, changed=False, mine=mine, wake_at=None if mine else now + self._job_lease_s)
        only = None if job.state is JobState.PENDING else [host.node_id for host in job.hosts]
        views = tx.node_views(self._owner, self._alive_since(now), only, lock=only is None)
        decision = decide(job, views, now, self._options)
        new, events = apply(job, decision, now)
        tx.save_job(job, new, events)
        if new.state.terminal:
            tx.release_lease(job_id, self._owner)
        wake_at = decision.wake_at
        if self.shared:  # sessions with other coordinators end without a word to this one
            wake_at = min(wake_at or math.inf, now + self._options.lease_s / 2)
        return Reconciled(new, changed=new != job, mine=True, wake_at=wake_at)

    def _alive_since(self, now: float) -> float:
        """Sessions that another coordinator wrote down before this moment are not believed."""
        return now - self._options.lease_s

    def pending(self) -> list[str]:
        """Jobs that wait for nodes, the oldest first."""
        with self._store.transaction() as tx:
            return tx.pending()

    def job_counts(self) -> dict[JobState, int]:
        """Jobs by state."""
        with self._store.transaction() as tx:
            return tx.job_counts()

    def unfinished(self) -> dict[str, int]:
        """Job id -> revision."""
        with self._store.transaction() as tx:
            return tx.unfinished()

    def renew_leases(self) -> None:
        """Keeps the leases of this coordinator's jobs."""
        with self._store.transaction() as tx:
            tx.renew_leases(self._owner, self._clock() + self._job_lease_s)

    # ---- nodes

    def node_hello(self, node: NodeRecord) -> bool:
        """Takes a node in. True if its daemon was restarted since it was seen last. Raises ConflictError if another
        coordinator holds a living session of another daemon with the same id."""
        now = self._clock()
        with self._store.transaction() as tx:
            known = tx.node(node.node_id, lock=True)
            restarted = known is not None and known.boot_id != node.boot_id
            if known is not None and restarted and known.owner not in (None, self._owner):
                if known.last_seen >= self._alive_since(now):
                    raise ConflictError(
                        f"The node id {node.node_id!r} is in use by another daemon, on {known.hostname}. "
                        "Give each daemon a state folder or --node-id of its own."
                    )
            tx.put_node(replace(node, last_seen=now, owner=self._owner))
            return restarted

    def node_jobs(self, node_id: str) -> list[str]:
        """Jobs of which something may be left on the node."""
        with self._store.transaction() as tx:
            return tx.jobs_on_node(node_id)

    def node_lost(self, node_id: str, boot_id: str, last_seen: float) -> list[str]:
        """The session is gone; returns the jobs to look at."""
        with self._store.transaction() as tx:
            tx.disconnect_node(node_id, self._owner, boot_id, last_seen)
            return tx.jobs_on_node(node_id)

    def heartbeats(self, node_ids: Sequence[str]) -> None:
        """These nodes were heard of just now."""
        with self._store.transaction() as tx:
            tx.touch_nodes(sorted(node_ids), self._owner, self._clock())

    def nodes(self) -> tuple[list[NodeView], dict[str, str]]:
        """All nodes, and their versions."""
        with self._store.transaction() as tx:
            views = tx.node_views(self._owner, self._alive_since(self._clock()))
            return list(views.values()), tx.node_versions()

    def observe(self, node_id: str, boot_id: str, fact: LocalJob) -> Observed:
        """Takes in what a node says of a job."""

        def change(job: JobRecord, now: float) -> Changed:
            return observe(job, node_id, boot_id, fact, now)

        return self._take_in(fact.job_id, change, fact.generation)

    def forget(self, node_id: str, boot_id: str, job_id: str) -> Observed:
        """Takes in that a node holds nothing of a job that was placed on it."""
        return self._take_in(job_id, lambda job, now: forget(job, node_id, boot_id, now), None)

    def _take_in(
        self,
        job_id: str,
        change: Callable[[JobRecord, float], Changed],
        generation: int | None,
    ) -> Observed:
        now = self._clock()
        with self._store.transaction() as tx:
            job = tx.job(job_id, lock=True)
            if job is None or (generation is not None and generation != job.generation):
                return Observed(unknown=True)
            new, events = change(job, now)
            if new == job and not events:
                return Observed()
            tx.save_job(job, new, events)
            freed = any(
                host.phase is Phase.STOPPED and before.phase is not Phase.STOPPED
                for host, before in zip(new.hosts, job.hosts, strict=True)
            )
            return Observed(changed=True, freed=freed)


def _found(tx: Transaction, job_id: str, lock: bool = False) -> JobRecord:
    job = tx.job(job_id, lock) if len(job_id) <= 64 and "\0" not in job_id else None
    if job is None:
        raise NotFoundError(f"There is no job {job_id[:64]!r}. `bagua job list` shows those there are.")
    return job


def _free_port(tx: Transaction) -> int:
    taken = tx.master_ports()
    while True:
        port = secrets.choice(_PORTS)
        if port not in taken or len(taken) > len(_PORTS) // 2:
            return port
