"""Changes jobs and nodes in rounds: takes facts, decides, writes one transaction, then tells everybody.

    Intake --> Stage (pure) --> one transaction in the writer's thread --> board --> nodes, watchers, callers

Rounds follow each other, so what comes while one is being written shares the next transaction, and with it the wait for
the disk. What could not be written goes back to the intake: facts are never lost, callers get the error.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import sqlalchemy as sa
import structlog

from bagua.base.errors import NotFoundError, ServiceError, UnavailableError
from bagua.daemon.coordinator.rounds.inbox import Inbox, Introduction, Submission, settle
from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rounds.live_state import Board, shape_of
from bagua.daemon.coordinator.rounds.own_lease import OwnLease
from bagua.daemon.coordinator.rounds.publisher import YIELD_EVERY, Publisher
from bagua.daemon.coordinator.rounds.resync import Resync
from bagua.daemon.coordinator.rounds.round_state import FAULT_RETRY_S, Stage
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.coordinator_leases import CoordinatorLeases
from bagua.daemon.coordinator.rules.domain import CoordinatorRecord, JobRecord, JobState, NodeRecord, Phase, Stored
from bagua.daemon.coordinator.rules.node_leases import NodeLeases
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.store.batch import Batch, Outcome
from bagua.daemon.coordinator.store.store import Transaction
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.streams.sessions import NodeSession, Sessions
from bagua.daemon.coordinator.streams.watchers import STOPPING

FIRST_RETRY_S = 0.1  # after an error of the database
MAX_RETRY_S = 2.0
_BEAT_S = 3.0
_MOST_FACTS = 500  # in one round: the event loop must not stand still for long
# A round looks at all parts of the jobs that it changes. So facts gather after it, for so many seconds for each of many
# parts, or for as long as the round took: then the number of rounds that a job takes does not grow with its nodes.
_LARGE = 40
_GATHER_S = 25e-6
_MOST_GATHER_S = 0.25

log = structlog.get_logger("coordinator.reconciler")


class Reconciler:
    """The task that makes rounds; see ``run``."""

    def __init__(
        self,
        intake: Intake,
        worker: Worker,
        owner: str,
        options: Options,
        clock: ServiceClock,
        board: Board,
        sessions: Sessions,
        publisher: Publisher,
        counters: Counter[tuple[str, str]],
        job_lease_s: float = 3.0,
        node_leases: NodeLeases | None = None,
        refuses: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """``node_leases`` learns what becomes of the database; ``refuses`` tells whether its port refuses."""
        self._intake = intake
        self._worker = worker
        self._owner = owner
        self._options = options
        self._clock = clock
        self._board = board
        self._sessions = sessions
        self._publisher = publisher
        self._counters = counters
        self._leases = CoordinatorLeases(owner, clock, options.lease_s, job_lease_s) if worker.store.shared else None
        self._beat_s = min(_BEAT_S, options.lease_s / 4, job_lease_s / 4 if worker.store.shared else _BEAT_S)
        node_leases = node_leases or NodeLeases(worker.store.shared, options.outage_s)
        missed_s = options.lease_s - 2 * self._beat_s
        self.lease = OwnLease(owner, clock, self._leases, node_leases, refuses, missed_s, board.put_forward)
        self._resync = Resync(worker, clock, board, sessions, intake, publisher, self._leases, self.lease)
        self._next_beat = 0.0
        self._in_doubt = False  # a write has failed: it may have been done all the same

    # ---- life

    async def start(self) -> int:
        """Reads what there is, as a former run of this coordinator left it; returns the number of unfinished jobs."""
        began = self.lease.now()
        held, coordinators, nodes, jobs = await self._worker.write(self._load)
        beats = {one.owner: one.clock for one in coordinators}
        self._clock.catch_up(max(beats.values(), default=0.0))  # times that are stored must not lie ahead of it
        self._options = replace(self._options, started_clock=self._clock.now())
        for stored in jobs:
            self._board.put(stored)
        for node in nodes:
            self._board.put_node(node, connected=False, heard_clock=self._clock.now())  # nobody listened until now
        if self._leases is not None:
            self._leases.observe(beats)
            self.lease.held_before(began, held)
            self.lease.loaded(began, coordinators)
        self._intake.look(stored.job.job_id for stored in jobs)
        return len(self._board.unfinished)

    def _load(self, tx: Transaction) -> tuple[list[str], list[CoordinatorRecord], list[NodeRecord], list[Stored]]:
        held = tx.disconnect_all(self._owner)
        return held, tx.coordinators(), tx.nodes(), tx.stored(list(tx.live()))

    async def run(self) -> None:
        """Makes rounds until cancelled."""
        retry_s, loop = FIRST_RETRY_S, asyncio.get_running_loop()
        try:
            while True:
                await self._intake.wait(self._next_turn())
                try:
                    began = loop.time()
                    parts = await self._round()
                    retry_s = FIRST_RETRY_S
                    if parts >= _LARGE:
                        await asyncio.sleep(min(max(parts * _GATHER_S, loop.time() - began), _MOST_GATHER_S))
                except (ServiceError, sa.exc.DBAPIError) as error:  # nothing is lost, it is tried again
                    await self.lease.failed()
                    log.warning("not_written", error=str(error), again_in_s=retry_s)
                    self._counters["reconcile_errors", ""] += 1
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
                except Exception:
                    log.exception("reconcile_failed")
                    self._counters["reconcile_errors", ""] += 1
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
        finally:
            self._intake.close()

    async def stop(self) -> None:
        """Gives back what this coordinator holds, after ``run`` has ended."""
        await self._worker.write(self._give_back)

    def _give_back(self, tx: Transaction) -> None:
        tx.beat(self._owner, self._clock.now())
        tx.disconnect_all(self._owner)
        if self._worker.store.shared:
            tx.release_jobs(self._owner)

    def _next_turn(self) -> float:
        """Returns when a round is due even if nothing comes, by the service clock."""
        return self._next_beat if self._leases is None else min(self._next_beat, self._resync.due)

    # ---- a round

    async def _round(self) -> int:
        """Returns the number of parts of the jobs that it has changed."""
        now = self._clock.now()
        taken = self._intake.take(now, _MOST_FACTS)
        try:
            await self._resync.look(now)
            if self._in_doubt:
                await self._resync.compare()
                self._in_doubt = False
            await self._resync.load_unknown(taken)
            stage = await self._think(taken)
            batch = self._batch(taken, stage)
            outcome = Outcome()
            if batch or now >= self._next_beat:
                batch.announced = self.lease.announcement()
                began, beat = time.monotonic_ns(), self.lease.now()
                self.lease.writes(beat, batch.gone)
                outcome = await self.lease.await_database(self._worker.write_with(batch.write))
                came = (node.node_id for node in batch.introductions if node.node_id not in outcome.failed)
                self.lease.wrote(beat, batch.announced, came)
                self._counters["transactions", ""] += 1
                self._counters["transaction_ns", ""] += time.monotonic_ns() - began
                self._counters["events", "submitted"] += len(outcome.created)
                self._next_beat = self._clock.now() + self._beat_s  # any transaction is a beat, too
        except BaseException as error:
            self._in_doubt = True
            self._intake.inbox.put_back(taken)
            taken.fail(error if isinstance(error, Exception) else UnavailableError(f"{STOPPING} [BG802]"))
            raise
        try:
            await self._settle(taken, stage, batch, outcome)
        except BaseException:
            self._in_doubt = True  # the board may not have all that was written
            raise
        finally:  # nobody waits for an answer that does not come
            taken.fail(UnavailableError(f"{STOPPING} [BG802]"))
        return sum(len(change.job.parts) for change in batch.changes)

    async def _think(self, taken: Inbox) -> Stage:
        looks = dict(taken.looks)
        stage = Stage(
            self._board,
            replace(self._options, arrived_clock=self.lease.arrived_clock),
            self._clock.now(),
            self._clock.wall(),
            self._mine,
            closed=frozenset(taken.introductions),
            heard=self._sessions.heard,
        )
        for mark in taken.marks:
            stage.mark(mark.node_id, mark.draining, mark.leaving)
            looks.update(dict.fromkeys(self._board.on_node(mark.node_id)))
        for job_id in self._resync.take_orphans():
            stage.claim(job_id, self._owner)
            looks[job_id] = None
        for came in taken.introductions.values():
            for job_id in self._board.on_node(came.session.node_id):
                looks[job_id] = None
                if job_id not in came.held:
                    stage.forget(came.session.node_id, came.session.boot_id, job_id)
        for job_id, reason in taken.faults.items():
            stage.fail(job_id, reason)
            looks[job_id] = None
        for request in taken.requests:
            try:
                stage.wish(request.job_id, request.wish)
            except ServiceError as error:
                settle(request.done, error=error)
            looks[request.job_id] = None
        for number, fact in enumerate(taken.facts.values(), 1):
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            known = stage.observe(fact.node_id, fact.boot_id, fact.job)
            if known:
                looks[fact.job.job_id] = None
            elif fact.job.phase is not Phase.STOPPED:
                self._publisher.refuse(fact)
        await self._decide(stage, looks, taken.room)
        for fault in stage.faults:
            self._publisher.note_fault(fault)
        for node_id, words in stage.silent.items():  # the end of its session tells the coordinator that decides
            if (session := self._sessions.get(node_id)) is not None:
                session.close(words)
        return stage

    async def _decide(self, stage: Stage, looks: Iterable[str], room: bool) -> None:
        waiting: list[JobRecord] = []
        for number, job_id in enumerate(looks, 1):
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            job = stage.job(job_id)
            if job is None:
                continue
            if job.state is JobState.PENDING and job.cancel_reason is None:
                waiting.append(job)
            else:
                stage.decide(job_id)
        if room or stage.has_room:
            stage.place()
            for job_id in sorted(self._board.growing):  # after those that wait for their first nodes
                stage.decide(job_id)
        elif waiting:
            stage.place({shape_of(job) for job in waiting})
        for number, job in enumerate(waiting, 1):
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            left = stage.job(job.job_id)
            if left is not None and left.state is JobState.PENDING:
                stage.decide(job.job_id)
        if stage.left:
            stage.place()
        self._counters["reconciles", ""] += len(waiting)

    def _batch(self, taken: Inbox, stage: Stage) -> Batch:
        came = [one.node for one in taken.introductions.values() if self._lives(one.session)]
        return Batch(
            owner=self._owner,
            clock=self._clock.now(),
            wall=self._clock.wall(),
            submissions=[(call.job, call.idempotency_key) for call in taken.submissions],
            introductions=[self._as_known(node) for node in came],
            gone=list(taken.gone),
            marks=[(mark.node_id, mark.draining, mark.leaving) for mark in taken.marks],
            changes=stage.changes(),
            lives=self._leases.may_live if self._leases is not None else None,
        )

    async def _settle(self, taken: Inbox, stage: Stage, batch: Batch, outcome: Outcome) -> None:
        """Brings memory up to date after the writing, then tells everybody who waits for it."""
        self._board.kept = stage.kept
        refused = outcome.stale | outcome.failed.keys()
        again: set[str] = set(outcome.stale)
        for change in batch.changes:
            if change.job.job_id not in refused:
                self._publisher.install(change)
            elif change.job.job_id in outcome.failed:
                self._counters["faults", "write"] += 1
                self._intake.wake_at(change.job.job_id, self._clock.now() + FAULT_RETRY_S)
        for job_id, at in stage.wakes.items():
            self._intake.wake_at(job_id, at)
        for change in batch.changes:
            if change.job.job_id not in refused:
                await self._publisher.send(change.job, change.old.job)  # it lets others run: they see the whole round
        self._counters["decisions", ""] += stage.decisions
        for came in taken.introductions.values():
            self._welcome(came, outcome)
        if again:
            await self._resync.reload(again)
            self._intake.inbox.facts = {
                **{key: fact for key, fact in taken.facts.items() if fact.job.job_id in again},
                **self._intake.inbox.facts,
            }
            self._intake.look(again)
        self._answer_submissions(taken.submissions, outcome)
        self._intake.inbox.requests += [request for request in taken.requests if request.job_id in again]
        taken.requests = [request for request in taken.requests if request.job_id not in again]  # the others wait on
        for request in taken.requests:
            found = None if request.job_id in refused else self._board.job(request.job_id)
            settle(request.done, found, error=outcome.failed.get(request.job_id, NotFoundError(request.job_id)))
        for mark in taken.marks:
            self._intake.inbox.room |= self._board.mark_node(mark.node_id, mark.draining, mark.leaving)
            if mark.done is not None:
                failed = outcome.failed.get(mark.node_id)
                settle(mark.done, None if failed else True, error=failed)
        self._publisher.show_waiting(self._clock.now())

    def _welcome(self, came: Introduction, outcome: Outcome) -> None:
        node_id = came.session.node_id
        error = outcome.failed.get(node_id)
        if error is not None or not self._lives(came.session):
            settle(came.done, error=error or UnavailableError("the session has ended [BG802]"))
            return
        view = self._board.views.get(node_id)
        restarted = view is not None and view.boot_id != came.session.boot_id
        heard = came.session.heard_clock
        self._intake.inbox.room |= self._board.put_node(self._as_known(came.node), connected=True, heard_clock=heard)
        self._publisher.send_to_node(node_id)
        self._intake.look(self._board.on_node(node_id))
        settle(came.done, restarted)

    def _as_known(self, node: NodeRecord) -> NodeRecord:
        """Wishes stay when a node introduces itself again: until somebody says otherwise, or for this run of its daemon
        alone."""
        view = self._board.views.get(node.node_id)
        if view is None:
            return node
        leaving = node.leaving or (view.leaving and view.boot_id == node.boot_id)
        return replace(node, draining=view.asked_to_drain, leaving=leaving)

    def _answer_submissions(self, calls: list[Submission], outcome: Outcome) -> None:
        for call in calls:
            job = call.job
            if job.job_id in outcome.created:
                self._board.put(Stored(job, 1, outcome.created[job.job_id], self._owner))
                self._intake.look([job.job_id])
                settle(call.done, job)
            elif job.job_id in outcome.failed:
                settle(call.done, error=outcome.failed[job.job_id])
            else:
                settle(call.done, outcome.first.get(call.idempotency_key), error=UnavailableError("try again [BG802]"))

    # ---- helpers

    def _mine(self, stored: Stored) -> bool:
        return self._leases is None or stored.owner == self._owner

    def _lives(self, session: NodeSession) -> bool:
        return self._sessions.get(session.node_id) is session and not session.closed.is_set()
