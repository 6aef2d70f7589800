"""Makes known what was written: on the board first, then to nodes, to watchers, and to those who wait for an end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from bagua.daemon.coordinator.rounds.inbox import Fact
from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rounds.live_state import Board
from bagua.daemon.coordinator.rounds.round_state import Fault, fault_reason
from bagua.daemon.coordinator.rules.domain import Change, JobRecord, JobState, Stored
from bagua.daemon.coordinator.streams.directives import Order
from bagua.daemon.coordinator.streams.sessions import Sessions
from bagua.daemon.coordinator.streams.watchers import Watchers
from bagua.proto import node_pb2

YIELD_EVERY = 5  # facts, jobs or directives: the event loop must not stand still for long
_MOST_SHOWN = 4_000  # characters of a fact in the log
_PENDING_SHOWN_S = 0.5  # how often watchers hear why a job waits

log = structlog.get_logger("coordinator.publisher")


@dataclass(eq=False)
class Publisher:
    """``on_end`` is called when a job has ended."""

    board: Board
    sessions: Sessions
    watchers: Watchers
    intake: Intake
    counters: Counter[tuple[str, str]]
    on_end: Callable[[], None]

    def __post_init__(self) -> None:
        self._next_shown = 0.0
        self._told: dict[str, Order] = {}  # the last that all nodes of a job were told
        self.on_change: Callable[[Change], None] = lambda change: None  # after it was written

    # ---- jobs as they are now

    def install(self, change: Change) -> None:
        """Installs a decision of this coordinator that was written. Nodes hear of it by ``send``."""
        job = change.job
        before = change.old.job
        self.board.put(change.stored)
        if job.state is not before.state or job.reason != before.reason:
            log.info("decided", job=job.job_id, state=job.state.name, reason=job.reason, generation=job.generation)
        for event in change.events:
            self.counters["events", event.kind] += 1
        self.on_change(change)
        self.watchers.notify(job.job_id)
        if job.state.terminal and not before.state.terminal:
            self.counters["ended", job.state.name.lower()] += 1
        if job.state.terminal:
            self.intake.drop_deadline(job.job_id)
            self.on_end()

    async def replace(self, job_id: str, stored: Stored | None) -> None:
        """Replaces a job by what the database has; None: it was deleted."""
        if stored is not None:
            self.board.put(stored)
            await self.send(stored.job)
            if stored.job.state.terminal:
                self.on_end()
        else:
            self.forget([job_id])
        self.watchers.notify(job_id)

    def forget(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.board.drop(job_id)
            self.sessions.forget(job_id)
            self._told.pop(job_id, None)

    # ---- nodes and watchers

    async def send(self, job: JobRecord, before: JobRecord | None = None) -> None:
        """Tells the job's nodes what to do. In parts: each directive wakes a stream. ``before``: the job as the nodes
        were told of it last; where the order is still that, it is news only for parts that are others."""
        with self._alone(job):
            parts = job.parts
            order = self.sessions.order(job)
            told = order is not None and self._told.get(job.job_id) is order
            if told and before is not None and len(parts) == len(before.parts):
                parts = tuple(part for part, old in zip(parts, before.parts, strict=True) if part is not old)
            for start in range(0, len(parts), YIELD_EVERY):
                if start:
                    await asyncio.sleep(0)
                self.sessions.send(job.job_id, parts[start : start + YIELD_EVERY], order)
            if order is None:
                self._told.pop(job.job_id, None)
            else:
                self._told[job.job_id] = order

    def send_to_node(self, node_id: str) -> None:
        """Tells a node what to do about all of its jobs: it has introduced itself."""
        for job_id in self.board.on_node(node_id):
            job = self.board.job(job_id)
            if job is not None:
                with self._alone(job):
                    of_node = [host for host in job.parts if host.node_id == node_id]
                    self.sessions.send(job_id, of_node, self.sessions.order(job))

    def refuse(self, fact: Fact) -> None:
        """Tells a node to stop what it should not have."""
        session = self.sessions.get(fact.node_id)
        if session is not None:
            stop = node_pb2.StopJob(
                job_id=fact.job.job_id,
                generation=fact.job.generation,
                reason="the coordinator does not know this job or has replaced this generation",
            )
            session.send(node_pb2.Directive(stop=stop))

    def show_waiting(self, now: float) -> None:
        """Tells those who watch a job that waits why it waits now; not too often. ``now`` by the service clock."""
        if now >= self._next_shown and self.board.waiting:
            self._next_shown = now + _PENDING_SHOWN_S
            for job_id in self.watchers.watched():
                job = self.board.job(job_id)
                if job is not None and job.state is JobState.PENDING:
                    self.watchers.notify(job_id)

    # ---- faults of the coordinator

    def note_fault(self, fault: Fault) -> None:
        """Logs a fault, and counts it."""
        self.counters["faults", fault.step] += 1
        content = {} if fault.content is None else {"content": repr(fault.content)[:_MOST_SHOWN]}
        known = self.board.job(fault.job_id)
        generation = None if known is None else known.generation
        about = {"job": fault.job_id, "generation": generation, "step": fault.step}
        log.error("step_failed", **about, **content, exc_info=fault.error)

    @contextmanager
    def _alone(self, job: JobRecord) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a fault of the coordinator: it ends this job and holds up no other
            self.note_fault(Fault(job.job_id, "tell", error))
            self.intake.inbox.faults[job.job_id] = fault_reason("tell", error)
