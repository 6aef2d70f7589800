"""Deletes old jobs with their events and hosts: by age, or when there are too many.

It works in small steps, so that nobody waits for it. Daemons delete the logs of ended jobs by a count of their own."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
import structlog

from bagua.base.errors import ConfigError, ServiceError
from bagua.daemon.coordinator.clock import ServiceClock
from bagua.daemon.coordinator.store import Store
from bagua.daemon.coordinator.worker import Worker

_AT_ONCE = 20  # jobs in one transaction
_PAUSE_S = 0.05  # between two transactions
_EVERY_S = 60.0
_DAY_S = 86_400.0
_SECONDS = {"d": _DAY_S, "h": 3_600.0}

log = structlog.get_logger("coordinator.retention")


@dataclass(frozen=True)
class Keep:
    """How much of the past stays: jobs that ended at most ``age_s`` ago, and of those the ``jobs`` newest."""

    age_s: float = 30 * _DAY_S
    jobs: int = 10_000


def parse_keep(text: str) -> Keep:
    """``30d``, ``12h``, ``5000`` (jobs), or both: ``30d,5000``; a number alone has no limit of age, an age alone none
    of number; ``forever``: neither. Raises ConfigError."""
    age_s, jobs = math.inf, 2**62
    if text == "forever":
        return Keep(age_s, jobs)
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})([dh]?)", part.strip())
        if found is None:
            raise ConfigError(
                f"--keep {text!r} can't be understood: write 30d, 12h, a number of jobs, both (30d,10000), or forever."
            )
        number, unit = int(found[1]), found[2]
        if unit:
            age_s = number * _SECONDS[unit]
        else:
            jobs = number
    return Keep(age_s, jobs)


class Retention:
    """``on_deleted`` gets the ids of jobs that are gone."""

    def __init__(
        self, worker: Worker, store: Store, clock: ServiceClock, keep: Keep, on_deleted: Callable[[list[str]], None]
    ) -> None:
        self._worker = worker
        self._store = store
        self._clock = clock
        self._keep = keep
        self._on_deleted = on_deleted

    async def run(self) -> None:
        """Until cancelled."""
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
            await self._worker.write(self._delete, found)
            self._on_deleted(found)
        return len(found)

    def _expired(self) -> list[str]:
        before = self._clock.wall() - self._keep.age_s if math.isfinite(self._keep.age_s) else 0.0
        with self._store.read() as tx:
            return tx.expired(before, self._keep.jobs, _AT_ONCE)

    def _delete(self, job_ids: list[str]) -> None:
        with self._store.transaction() as tx:
            tx.delete_jobs(job_ids)
