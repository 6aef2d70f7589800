"""One life of a coordinator: its real reconciler, sessions, servicer and decisions, put together as the server does."""

import asyncio
import contextlib
from collections import Counter

from sqlalchemy.exc import OperationalError

from bagua.base.errors import ServiceError
from bagua.daemon.coordinator.api.nodes_servicer import NodeServicer
from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rounds.live_state import Board
from bagua.daemon.coordinator.rounds.publisher import Publisher
from bagua.daemon.coordinator.rounds.reconciler import Reconciler
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.streams.sessions import Sessions
from bagua.daemon.coordinator.streams.watchers import STOPPING, Watchers
from bagua.daemon.coordinator.use.code_archives import CodeArchives
from bagua.daemon.coordinator.use.held_secrets import HeldSecrets
from bagua.daemon.coordinator.use.tuning import Tuning
from bagua.proto import node_pb2
from simulated.daemon import HEARTBEAT_S
from simulated.database import VirtualWorker

OWNER = "the-coordinator"
LEASE_S = 10.0
TICK_S = 2.0
JOINS = {"join_s": 15.0, "join_wait_s": 1.0, "rejoin_s": 2.0, "most_rejoin_s": 8.0}
OPTIONS = Options(lease_s=LEASE_S, settle_s=0.5, stop_margin_s=15.0, start_s=25.0, fence_s=20.0, max_stalls=2, **JOINS)
WELCOME = node_pb2.Welcome(heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S, fence_s=OPTIONS.fence_s, sole=True)


class Life:
    """``start``, then it serves until ``stop`` or ``kill``."""

    make_board = Board
    make_servicer = NodeServicer
    make_intake = Intake

    def __init__(self, store, trouble, on_cancel):
        loop = asyncio.get_running_loop()
        self.store = store
        self.worker = VirtualWorker(store, trouble, on_cancel)
        self.board = self.make_board()
        self.sessions = Sessions(lambda: None)
        self.watchers = Watchers()
        self.clock = ServiceClock(TICK_S, monotonic=loop.time, wall=loop.time)
        self.intake = self.make_intake(self.board, self.clock)
        parts = (self.intake, self.worker, OWNER, OPTIONS, self.clock, self.board, self.sessions)
        counters = Counter()
        publisher = Publisher(self.board, self.sessions, self.watchers, self.intake, counters, lambda: None)
        self.reconciler = Reconciler(*parts, publisher, counters)
        tuning = Tuning(self.worker, self.clock)
        code = CodeArchives(self.worker, self.clock)
        self.servicer = self.make_servicer(
            self.intake, self.sessions, self.watchers, self.clock, WELCOME, tuning, code, HeldSecrets()
        )
        self.listens = False
        self.streams = {}
        self._tasks = []

    async def start(self):
        """Raises OperationalError: then it must be started again."""
        await self.reconciler.start()
        if self.worker.killed:
            raise ConnectionError("it was killed while it started")
        for work in (self.reconciler.run(), self._keep_time()):
            self._tasks.append(asyncio.get_running_loop().create_task(work))
        self.listens = True

    async def _keep_time(self):
        while True:
            await asyncio.sleep(self.clock.tick_s)
            self.clock.tick()
            self.sessions.close_silent(self.clock.now(), LEASE_S)

    def accept(self, stream):
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self.streams[task] = stream
        stream.handler = task
        task.add_done_callback(self._ended)

    async def _serve(self, stream):
        with contextlib.suppress(
            ServiceError, ConnectionError, OperationalError
        ):  # which the interceptor turns into a status
            await self.servicer.Session(None, stream)

    def _ended(self, task):
        self.streams.pop(task).down.end()
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "a session failed", "exception": task.exception()}
            asyncio.get_running_loop().call_exception_handler(context)

    async def stop(self):
        self.servicer.stopping = True
        self.sessions.close_all(STOPPING)
        self.watchers.close()
        await self._end()
        with contextlib.suppress(Exception):  # of the database
            await self.reconciler.stop()
        self.worker.killed = True

    async def kill(self):
        """SIGKILL: nothing more is written, and nobody is told."""
        self.worker.killed = True
        await self._end()

    async def _end(self):
        self.listens = False
        tasks = [*self._tasks, *self.streams]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
