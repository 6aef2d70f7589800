"""Deletes old jobs with their events and hosts: by age, or when there are too many, or they are too large.

It works in small steps, so that nobody waits for it. Daemons delete the logs of ended jobs themselves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import sqlalchemy as sa
import structlog

from bagua.base.errors import ServiceError
from bagua.base.retention import Keep
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.store.store import Transaction
from bagua.daemon.coordinator.store.worker import Worker

_AT_ONCE = 20  # jobs in one transaction
_PAUSE_S = 0.05  # between two transactions
_EVERY_S = 60.0

log = structlog.get_logger("coordinator.retention")


class Retention:
    """``on_deleted`` gets the ids of jobs that are gone."""

    def __init__(
        self, worker: Worker, clock: ServiceClock, keep: Keep, on_deleted: Callable[[list[str]], None]
    ) -> None:
        self._worker = worker
        self._clock = clock
        self._keep = keep
        self._on_deleted = on_deleted

    async def run(self) -> None:
        """Deletes old jobs now and then, until cancelled."""
        while True:
            try:
                while await self.step():
                    await asyncio.sleep(_PAUSE_S)
            except (ServiceError, sa.exc.SQLAlchemyError) as error:
                log.warning("old_jobs_stay", error=str(error))
            await asyncio.sleep(_EVERY_S)

    async def step(self) -> int:
        """Deletes some; returns how many."""
        found = await self._worker.read(self._expired)
        if found:
            await self._worker.write(lambda tx: tx.delete_jobs(found))
            self._on_deleted(found)
        return len(found)

    def _expired(self, tx: Transaction) -> list[str]:
        before = self._clock.wall() - self._keep.age_s if math.isfinite(self._keep.age_s) else 0.0
        if math.isfinite(self._keep.size) and tx.ended_bytes() > self._keep.size:
            return tx.expired(before, 0, _AT_ONCE)  # the oldest, whatever their age; then the size is looked at again
        return tx.expired(before, self._keep.jobs, _AT_ONCE)
