"""Looks at jobs when something happened to them, or when a deadline has come; never in a busy loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

import structlog

from bagua.daemon.coordinator.counters import Counters
from bagua.daemon.coordinator.domain import JobState
from bagua.daemon.coordinator.service import Service
from bagua.daemon.coordinator.sessions import Sessions
from bagua.daemon.coordinator.watchers import Watchers
from bagua.daemon.coordinator.worker import Worker

_RETRY_S = 1.0  # after an error of the database
_LEAST_S = 0.01  # between two looks for a deadline: clocks have a resolution
_RESYNC_S = 1.0  # how often to look for what other coordinators have changed

log = structlog.get_logger("coordinator.reconciler")


class Reconciler:
    """One task (``run``); everything else may be called from the event loop at any time."""

    def __init__(
        self,
        worker: Worker,
        service: Service,
        sessions: Sessions,
        watchers: Watchers,
        counters: Counters,
        clock: Callable[[], float],
        job_lease_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._service = service
        self._sessions = sessions
        self._watchers = watchers
        self._counters = counters
        self._clock = clock
        self._job_lease_s = job_lease_s
        self._on_end = on_end
        self._due: dict[str, float] = {}  # job id -> when, by the loop's clock; in order of insertion
        self._check_pending = False
        self._revisions: dict[str, int] = {}
        self._wake = asyncio.Event()

    def wake(self, job_id: str, delay: float = 0.0) -> None:
        """Look at the job after ``delay`` seconds, or earlier if that was wanted before."""
        at = asyncio.get_running_loop().time() + delay
        self._due[job_id] = min(at, self._due.get(job_id, math.inf))
        self._wake.set()

    def wake_all(self, job_ids: Iterable[str]) -> None:
        """Look at these jobs now."""
        for job_id in job_ids:
            self.wake(job_id)

    def wake_pending(self) -> None:
        """Slots became free: look at the jobs that wait for some, the oldest first."""
        self._check_pending = True
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        housekeeping_s = min(self._job_lease_s / 3, _RESYNC_S) if self._service.shared else self._job_lease_s / 3
        next_housekeeping = loop.time() + housekeeping_s
        while True:
            next_due = min(self._due.values(), default=math.inf)
            delay = max(0.0, min(next_due, next_housekeeping) - loop.time())
            try:
                async with asyncio.timeout(0 if self._check_pending else delay):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                if loop.time() >= next_housekeeping:
                    next_housekeeping = loop.time() + housekeeping_s
                    await self._housekeeping()
                if self._check_pending:
                    self.wake_all(await self._worker.call(self._service.pending))
                    self._check_pending = False
                for job_id in [job_id for job_id, at in self._due.items() if at <= loop.time()]:
                    del self._due[job_id]
                    await self._look(job_id)
            except Exception:  # of the database: nothing is lost, it is looked at again
                log.exception("reconcile_failed")
                self._counters.add("reconcile_errors")
                await asyncio.sleep(_RETRY_S)

    async def _housekeeping(self) -> None:
        await self._worker.call(self._service.renew_leases)
        if not self._service.shared:
            return
        found = await self._worker.call(self._service.unfinished)
        for job_id in found.keys() | self._revisions.keys():
            if found.get(job_id) != self._revisions.get(job_id):
                self._watchers.notify(job_id)
                self.wake(job_id)
        self._revisions = found

    async def _look(self, job_id: str) -> None:
        try:
            result = await self._worker.call(self._service.reconcile, job_id)
        except Exception:
            self.wake(job_id, _RETRY_S)
            raise
        self._counters.add("reconciles")
        if result is None:
            return
        job = result.job
        if result.changed:
            self._counters.add("decisions")
            log.info("decided", job=job_id, state=job.state.name, reason=job.reason, generation=job.generation)
            self._watchers.notify(job_id)
            if job.state.terminal:
                self._on_end()
                self.wake_pending()
            elif job.state is not JobState.PENDING:
                self.wake(job_id)  # the next step may be possible already
        self._sessions.tell(job)
        if result.wake_at is not None:
            self.wake(job_id, max(_LEAST_S, result.wake_at - self._clock()))
