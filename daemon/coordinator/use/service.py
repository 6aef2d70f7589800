"""Use cases of users. Living jobs are read from memory, ended ones from the database. Changes go to the intake and
are acknowledged when they are stored."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence

from bagua.base.errors import ConflictError, InvalidRequestError, NotFoundError
from bagua.daemon.coordinator.rounds import requests
from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rounds.live_state import Board
from bagua.daemon.coordinator.rules.access import Owned, unknown_job
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.domain import Event, JobRecord, JobSpec, JobState, NodeView
from bagua.daemon.coordinator.rules.identity import CURRENT, DEFAULT_NAMESPACE, EVERYWHERE
from bagua.daemon.coordinator.rules.joins import growth
from bagua.daemon.coordinator.store import listing
from bagua.daemon.coordinator.store.store import Transaction
from bagua.daemon.coordinator.store.worker import Worker
from bagua.proto import job_pb2

MAX_EVENTS = 1_000  # in one answer


class Service:
    """Use from the event loop."""

    def __init__(self, worker: Worker, board: Board, intake: Intake, clock: ServiceClock) -> None:
        self._worker = worker
        self._board = board
        self._intake = intake
        self._clock = clock

    async def submit(
        self, spec: JobSpec, idempotency_key: str, job_id: str = "", namespace: str = "", unix_user: str = ""
    ) -> JobRecord:
        """A new job, or the one that this account has submitted in this namespace with the same key. Raises
        ConflictError if that had another specification."""
        caller = CURRENT.get()
        if len(idempotency_key) > 200 or "\0" in idempotency_key:
            raise InvalidRequestError("idempotency_key: 200 characters at most, no NUL. [BG811]")
        job = JobRecord(
            job_id=job_id or new_job_id(),
            spec=spec,
            created_at=self._clock.wall(),
            reason="submitted",
            submitted_clock=self._clock.now(),
            master_port=spec.master_port or self._board.free_port(),
            job_key=secrets.token_bytes(32),
            namespace=namespace or DEFAULT_NAMESPACE,
            submitted_by=caller.name,
            unix_user=unix_user,
        )
        found = await self._intake.submit(job, stored_key(idempotency_key, job.namespace, job.submitted_by))
        if (found.spec, found.unix_user) != (job.spec, job.unix_user):
            raise ConflictError(
                f"idempotency_key {idempotency_key!r}: {found.job_id} was submitted with it, and is another job. "
                "Choose another key. [BG811]"
            )
        return found

    async def owned(self, job_id: str) -> Owned | None:
        """Returns where a job belongs; None if there is no such job."""
        living = self._board.job(job_id)
        if living is not None:
            return Owned(living.namespace, living.submitted_by)
        return await self._worker.read(lambda tx: tx.owned(job_id)) if _plausible(job_id) else None

    async def job(self, job_id: str) -> JobRecord:
        living = self._board.job(job_id)
        return self._board.shown(living) if living is not None else await self._ended(job_id)

    async def jobs(
        self, states: Sequence[JobState], limit: int, page_token: str, namespace: str = EVERYWHERE
    ) -> tuple[list[job_pb2.Job], str]:
        """A page of the newest first, and the token of the next. Raises InvalidRequestError."""
        found, token = await self._worker.read(lambda tx: listing.jobs(tx, states, limit, page_token, namespace))
        for summary in found:
            job = self._board.job(summary.job_id)
            if job is not None and job.state.value == summary.state:  # if it waits: what is missing now
                summary.reason = self._board.shown(job).reason
        return found, token

    async def find(self, prefix: str, namespace: str = EVERYWHERE) -> str:
        """The id of a job by its beginning. Raises NotFoundError, ConflictError."""
        return await self._worker.read(lambda tx: listing.find(tx, prefix, namespace))

    async def events(self, job_id: str, after_seq: int) -> list[Event]:
        """The next events of a job. Raises NotFoundError."""
        return (await self.job_and_events(job_id, after_seq))[1]

    async def job_and_events(self, job_id: str, after_seq: int) -> tuple[JobRecord, list[Event]]:
        """The job, and the next of its events: at least those that led to what the job shows. Raises NotFoundError."""
        living = self._board.job(job_id)
        # Before the wait: afterwards nodes may be taken, and a job that was placed would seem to wait for itself.
        shown = None if living is None else self._board.shown(living)
        return await self._worker.read(lambda tx: self._with_events(tx, shown, job_id, after_seq))

    async def cancel(self, job_id: str, reason: str) -> JobRecord:
        """Asks for the end of a job; one that ends or has ended stays as it is. Raises NotFoundError."""
        text = reason.replace("\0", "").strip()[:2_000]
        try:
            why = f"cancelled: {text}" if text else "cancelled"
            return await self._intake.request(job_id, lambda job: requests.cancel(job, why))
        except NotFoundError:
            return await self._ended(job_id)

    async def request(self, job_id: str, wish: Callable[[JobRecord], requests.Wished]) -> JobRecord:
        """Changes a job as somebody wants. Returns it once that is written. Raises what ``wish`` raises, and
        NotFoundError.
        """
        try:
            return await self._intake.request(job_id, wish)
        except NotFoundError:
            ended = await self._ended(job_id)
            raise ConflictError(f"Job {job_id} has ended: it is {ended.state.name.lower()}. [BG813]") from None

    async def drain(self, node_id: str, draining: bool, this_run: bool = False) -> tuple[NodeView, list[str]]:
        """Makes a node drain, or not. Returns it once that is written, and the jobs that have a part there.
        ``this_run``: as if its daemon had said that it will end. Raises NotFoundError, and ConflictError if it is the
        last node of an elastic job.
        """
        self.node(node_id)
        there = self._board.on_node(node_id)
        if draining:
            requests.last_of(node_id, self._jobs_on(node_id))
        await self._intake.drain(node_id, draining, this_run)
        return self._board.views[node_id], there

    def gone(self, node_id: str, why: str) -> tuple[NodeView, list[str]]:
        """Takes from outside that nothing is left of a node, as its machine or its pod is gone. Raises NotFoundError,
        and ConflictError while it has a session."""
        node = self.node(node_id)
        if node.connected:
            raise ConflictError(f"Node {node_id} has a session: it is not gone. [BG813]")
        jobs = self._jobs_on(node_id)
        self._intake.gone(node, jobs, why)
        return node, [job.job_id for job in jobs]

    def _jobs_on(self, node_id: str) -> list[JobRecord]:
        jobs = (self._board.job(job_id) for job_id in self._board.on_node(node_id))
        return [job for job in jobs if job is not None]

    def growth(self, job: JobRecord) -> str:
        """Says why nobody joins a job that could have more, in words."""
        return growth(job, self._board.views, self._clock.now())

    def count_jobs(self) -> dict[JobState, int]:
        """Counts jobs by state, for a caller in another thread."""
        return self._worker.store.look(lambda tx: tx.job_counts())

    def ended(self, job_id: str) -> bool:
        """True if nothing of the job starts any more."""
        job = self._board.job(job_id)
        return job is None or job.state.terminal

    def idle(self) -> bool:
        """True if no job is unfinished."""
        return not self._board.unfinished

    def nodes(self) -> list[NodeView]:
        """Lists all nodes that were ever seen, sorted by id. ``last_seen`` of a connected one is the beginning of its
        session.
        """
        # A copy: the metrics ask from another thread.
        return sorted(list(self._board.views.values()), key=lambda view: view.node_id)

    def living(self) -> list[JobRecord]:
        """Jobs that have not ended, the oldest first; also for a caller in another thread."""
        found = [stored.job for stored in list(self._board.jobs.values())]
        return sorted((job for job in found if not job.state.terminal), key=lambda job: (job.created_at, job.job_id))

    def node(self, node_id: str) -> NodeView:
        if node_id not in self._board.views:
            raise NotFoundError(f"There is no node {node_id[:200]!r}. `bagua node list` shows those there are. [BG810]")
        return self._board.views[node_id]

    def wall(self) -> float:
        """Returns the time in seconds since the epoch."""
        return self._clock.wall()

    async def _ended(self, job_id: str) -> JobRecord:
        return (await self._worker.read(lambda tx: self._with_events(tx, None, job_id, 0)))[0]

    # ---- in a thread

    def _with_events(
        self, tx: Transaction, living: JobRecord | None, job_id: str, after_seq: int
    ) -> tuple[JobRecord, list[Event]]:
        job = living or (self._of_store(tx, job_id) if _plausible(job_id) else None)
        if job is None:
            raise unknown_job(job_id)
        return job, tx.events(job_id, after_seq, MAX_EVENTS)

    def _of_store(self, tx: Transaction, job_id: str) -> JobRecord | None:
        """Reads a job, but keeps in memory the one that ended last: people look at it most often, and 8,000 ranks take
        60 ms to read.
        """
        last = self._board.last_ended
        if last is not None and last.job.job_id == job_id and last.revision == tx.revision(job_id):
            return last.job
        return tx.job(job_id)


def new_job_id() -> str:
    return f"job-{secrets.token_hex(5)}"


def stored_key(idempotency_key: str, namespace: str, account: str) -> str:
    """Accounts choose their keys in each namespace without knowing of each other."""
    if not idempotency_key:
        return ""
    return f"sha256:{hashlib.sha256(json.dumps([namespace, account, idempotency_key]).encode()).hexdigest()}"


def _plausible(job_id: str) -> bool:
    return len(job_id) <= 64 and "\0" not in job_id
