"""Takes in facts of nodes, calls of users and deadlines, and wakes the reconciler."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from typing import Any

from bagua.base.errors import UnavailableError
from bagua.daemon.coordinator.rounds.inbox import (
    Fact,
    Inbox,
    Introduction,
    Mark,
    Request,
    Submission,
    settle,
)
from bagua.daemon.coordinator.rounds.live_state import Board
from bagua.daemon.coordinator.rounds.requests import Wished
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.domain import JobRecord, LocalJob, NodeRecord, NodeView, Phase
from bagua.daemon.coordinator.streams.sessions import NodeSession
from bagua.daemon.coordinator.streams.watchers import STOPPING

_LEAST_S = 0.01  # between two looks for a deadline: clocks have a resolution


class Intake:
    """Intake of what rounds decide about. All methods may be called from the event loop at any time. ``inbox`` holds
    what no round has taken yet.
    """

    def __init__(self, board: Board, clock: ServiceClock) -> None:
        self.inbox = Inbox()
        self._board = board
        self._clock = clock
        self._due: list[tuple[float, str]] = []  # a heap of (service clock, job)
        self._due_of: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._closed = False

    # ---- for nodes and users

    def fact(self, session: NodeSession, job: LocalJob) -> None:
        """Takes what a node says of a job. It is kept until it is written."""
        fact = Fact(session.node_id, session.boot_id, job)
        self.inbox.facts[fact.key] = fact
        self._wake.set()

    async def introduce(self, session: NodeSession, node: NodeRecord, jobs: list[LocalJob]) -> bool:
        """Begins a session; returns when that is written, and the node is told its jobs. True if its daemon was
        restarted since it was seen last. Raises ConflictError if another coordinator holds a living session of another
        daemon with the same id."""
        held = frozenset(job.job_id for job in jobs)
        done: asyncio.Future[bool] = self._future()
        older = self.inbox.introductions.get(session.node_id)
        if older is not None:
            settle(older.done, error=UnavailableError("replaced by a newer session of this node [BG802]"))
        self._board.note_heard(session.node_id, session.heard_clock)
        self.inbox.introductions[session.node_id] = Introduction(session, node, held, done)
        for job in jobs:
            self.fact(session, job)
        self._wake.set()
        return await done

    def heard(self, session: NodeSession) -> None:
        """A daemon whose introduction is not written yet is there."""
        self._board.note_heard(session.node_id, session.heard_clock)

    def gone(self, node: NodeView, jobs: Iterable[JobRecord], why: str) -> None:
        """Takes from outside that nothing is left of a node without a session, as if its daemon said so."""
        for job in jobs:
            over = LocalJob(job.job_id, job.generation, Phase.STOPPED, error=why, withdrawn=True)
            fact = Fact(node.node_id, node.boot_id, over)
            self.inbox.facts[fact.key] = fact
        self._wake.set()

    def node_gone(self, session: NodeSession) -> None:
        """Ends a session. That counts at once, and is kept until it is written."""
        waiting = self.inbox.introductions.get(session.node_id)
        if waiting is not None and waiting.session is session:
            del self.inbox.introductions[session.node_id]
        self._board.set_connected(session.node_id, False, session.heard_clock, self._clock.wall())
        self.inbox.gone[session.node_id] = None
        self.look(self._board.on_node(session.node_id))

    async def submit(self, job: JobRecord, idempotency_key: str) -> JobRecord:
        """Submits a job. Returns it once it is written, or the one that was submitted with the same key."""
        call = Submission(job, idempotency_key, self._future())
        self.inbox.submissions.append(call)
        self._wake.set()
        return await call.done

    async def request(self, job_id: str, wish: Callable[[JobRecord], Wished]) -> JobRecord:
        """Changes a job as wished. Returns it once that is written. Raises what ``wish`` raises, and NotFoundError if
        it is not (or no longer) alive.
        """
        call = Request(job_id, wish, self._future())
        self.inbox.requests.append(call)
        self._wake.set()
        return await call.done

    async def drain(self, node_id: str, draining: bool, this_run: bool = False) -> None:
        """Returns once it is written that the node drains, or not; ``this_run``: as its daemon would say it."""
        done: asyncio.Future[bool] = self._future()
        mark = Mark(node_id, None, draining, done) if this_run else Mark(node_id, draining, None, done)
        self.inbox.marks.append(mark)
        self._wake.set()
        await done

    def places(self, job_id: str, node_id: str) -> bool:
        """True if the job has a part on that node."""
        return job_id in self._board.on_node(node_id)

    def leaving(self, session: NodeSession, leaving: bool) -> None:
        """Takes the word of a daemon that it will end, or not. It is kept until it is written."""
        self.inbox.marks.append(Mark(session.node_id, None, leaving))
        self._wake.set()

    def look(self, job_ids: Iterable[str]) -> None:
        """Decide about these jobs now."""
        self.inbox.looks.update(dict.fromkeys(job_ids))
        self._wake.set()

    # ---- for the reconciler

    def wake_at(self, job_id: str, at: float) -> None:
        """Decide about this job at that time of the service clock, instead of another one that was set before."""
        if self._due_of.get(job_id) != at:
            self._due_of[job_id] = at
            heapq.heappush(self._due, (at, job_id))

    def drop_deadline(self, job_id: str) -> None:
        """Drops the deadline of a job that has ended."""
        self._due_of.pop(job_id, None)

    async def wait(self, until: float) -> None:
        """Waits until there is something to take, a deadline is over, or the service clock shows ``until``."""
        if not self.inbox:
            if self._due:
                until = min(until, self._due[0][0])
            try:
                async with asyncio.timeout(max(_LEAST_S, until - self._clock.now())):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()

    def take(self, now: float, most_facts: int) -> Inbox:
        """Takes everything out, with the jobs whose deadline is over; but ``most_facts`` facts at most."""
        taken = self.inbox.take(most_facts)
        while self._due and self._due[0][0] <= now:
            at, job_id = heapq.heappop(self._due)
            if self._due_of.get(job_id) == at:  # else another time was set since: entries of the heap are not removed
                del self._due_of[job_id]
                taken.looks[job_id] = None
        return taken

    def close(self) -> None:
        """Closes the intake after the reconciler has stopped: callers get UnavailableError, now and later."""
        self._closed = True
        self.inbox.fail(UnavailableError(f"{STOPPING} [BG802]"))

    def _future(self) -> asyncio.Future[Any]:
        if self._closed:
            raise UnavailableError(f"{STOPPING} [BG802]")
        return asyncio.get_running_loop().create_future()
