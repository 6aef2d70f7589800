"""The audit log: calls that changed something, that read output, or that were refused.

Each is a line of the structured log at once, and a row of the database soon after: a call does not wait for that. A
coordinator that is killed loses the rows of the last moment, not the lines. Calls of strangers are counted in one line
a minute (``Refusals`` in host/connections.py) and get no rows: they could fill the disk.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
import structlog

from bagua.base.errors import ServiceError
from bagua.base.retention import Keep
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.identity import Identity
from bagua.daemon.coordinator.store.store import Transaction
from bagua.daemon.coordinator.store.worker import Worker

_MOST = 10_000  # rows that wait while the database can't be written; the oldest are dropped beyond it
_AT_ONCE = 500  # in one transaction
_PAUSE_S = 0.1  # rows of so long are written together
_TRIM_S = 60.0
_RETRY_S = 1.0
OK = "OK"

log = structlog.get_logger("coordinator.audit")


class Audit:
    """Use from the event loop."""

    def __init__(self, worker: Worker, clock: ServiceClock, keep: Keep) -> None:
        self._worker = worker
        self._clock = clock
        self._keep = keep
        self._rows: deque[dict[str, Any]] = deque()
        self._wake = asyncio.Event()
        self._lost = 0
        self._flushing = asyncio.Lock()  # readers of the log flush, too

    def add(self, caller: Identity, method: str, target: str, outcome: str, detail: str, peer: str) -> None:
        """Adds an entry for a call that was answered."""
        row = {
            "who": caller.name,
            "role": caller.role.value,
            "namespace": caller.namespace,
            "method": method.removeprefix("/bagua.v1.").lstrip("/")[:100],
            "target": target[:200],
            "outcome": outcome,
            "detail": detail[:2_000],
            "peer": peer[:200],
        }
        log.info("call", **row)
        self._rows.append({"time": self._clock.wall(), **{name: _clean(value) for name, value in row.items()}})
        if len(self._rows) > _MOST:
            self._rows.popleft()
            self._lost += 1
        self._wake.set()

    async def run(self) -> None:
        """Writes rows and deletes old ones, until cancelled."""
        trimmed = -math.inf
        while True:
            try:
                async with asyncio.timeout(_TRIM_S):
                    await self._wake.wait()
                await asyncio.sleep(_PAUSE_S)
            except TimeoutError:
                pass
            try:
                await self.flush()
                if self._clock.now() - trimmed >= _TRIM_S:
                    trimmed = self._clock.now()
                    while await self._worker.write(self._trim):
                        await asyncio.sleep(_PAUSE_S)
            except (ServiceError, sa.exc.SQLAlchemyError) as error:
                log.warning("audit_not_written", rows=len(self._rows), error=str(error))
                await asyncio.sleep(_RETRY_S)

    async def flush(self) -> None:
        """Writes what waits. Raises as the database does; the rows stay then."""
        async with self._flushing:
            self._wake.clear()
            while self._rows:
                part = [self._rows.popleft() for _ in range(min(_AT_ONCE, len(self._rows)))]
                try:
                    await self._write(part)
                except BaseException:
                    self._rows.extendleft(reversed(part))  # they stay in their order
                    self._wake.set()
                    raise
        if self._lost:
            log.error("audit_rows_lost", rows=self._lost)
            self._lost = 0

    async def entries(self, limit: int, before_seq: int, who: str, target: str, refused: bool) -> Sequence[sa.Row[Any]]:
        """Lists entries that fit, the newest first, with all that was added until now."""
        await self.flush()
        return await self._worker.read(lambda tx: tx.audit(limit, before_seq, who, target, refused))

    async def _write(self, rows: list[dict[str, Any]]) -> None:
        await self._worker.write(lambda tx: tx.add_audit(rows))

    def _trim(self, tx: Transaction) -> int:
        age_s = self._keep.age_s
        before = self._clock.wall() - age_s if math.isfinite(age_s) else 0.0
        return tx.trim_audit(before, self._keep.jobs, _AT_ONCE)


def _clean(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
