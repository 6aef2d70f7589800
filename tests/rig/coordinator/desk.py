"""The heart of a coordinator without sockets: store, board, reconciler and service over a real database, with clocks
that a test sets."""

import asyncio
import contextlib
from collections import Counter

import structlog

from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rounds.live_state import Board
from bagua.daemon.coordinator.rounds.publisher import Publisher
from bagua.daemon.coordinator.rounds.reconciler import Reconciler
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.domain import NodeRecord
from bagua.daemon.coordinator.rules.node_leases import NodeLeases
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.store.store import Store
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.streams.sessions import NodeSession, Sessions
from bagua.daemon.coordinator.streams.watchers import Watchers
from bagua.daemon.coordinator.use.service import Service

WAIT_S = 60.0
# As in a service: structlog's own choice draws frames with their variables, which takes seconds.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.dev.ConsoleRenderer(colors=False),
    ]
)


class Time:
    """The times of both clocks of a coordinator."""

    def __init__(self):
        self.monotonic = 0.0
        self.wall = 1e9


class Desk:
    """One coordinator. ``shared``: there may be others on the database."""

    def __init__(self, engine, owner="me", options=None, time=None, shared=False, make_worker=Worker):
        self.time = time or Time()
        self.options = options or Options(lease_s=10, settle_s=1)
        self.clock = ServiceClock(1e6, lambda: self.time.monotonic, lambda: self.time.wall)
        self.store = Store(engine, shared)
        self.worker = make_worker(self.store)
        self.board = Board()
        self.sessions = Sessions(lambda: None)
        self.watchers = Watchers()
        self.counters = Counter()
        self.intake = Intake(self.board, self.clock)
        self.publisher = Publisher(self.board, self.sessions, self.watchers, self.intake, self.counters, lambda: None)
        self.reconciler = Reconciler(
            self.intake,
            self.worker,
            owner,
            self.options,
            self.clock,
            self.board,
            self.sessions,
            self.publisher,
            self.counters,
            node_leases=NodeLeases(shared, self.options.outage_s, lambda: self.time.monotonic),
        )
        self.service = Service(self.worker, self.board, self.intake, self.clock)

    async def connect(self, name, slots=2, boot_id="boot", jobs=()):
        """A node introduces itself."""
        session = NodeSession(name, boot_id, f"host-{name}")
        session.note_heard(self.clock.now())
        self.sessions.add(session)
        node = NodeRecord(name, f"host-{name}", "127.0.0.1", slots, "1.0", boot_id, 0.0)
        try:
            await self.intake.introduce(session, node, list(jobs))
        except BaseException:
            self.leave(session)
            raise
        return session

    def leave(self, session):
        if self.sessions.remove(session):
            self.intake.node_gone(session)

    def pass_time(self, seconds):
        """Both clocks go on."""
        self.time.monotonic += seconds
        self.time.wall += seconds
        self.intake.look([])  # wakes it

    async def until(self, done, what=""):
        """Lets everything else go on until ``done()``."""
        async with asyncio.timeout(WAIT_S):
            while not done():
                await asyncio.sleep(0.002)


def clocks(tx):
    """The beats of coordinators."""
    return {one.owner: one.clock for one in tx.coordinators()}


@contextlib.asynccontextmanager
async def at_work(desk):
    """The reconciler runs."""
    await desk.reconciler.start()
    task = asyncio.create_task(desk.reconciler.run())
    try:
        yield desk
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await desk.reconciler.stop()
        desk.worker.close()
