"""Several coordinators over one database, a node, and its lease: who counts the node's silence, and from when.

The parts that count are the real ones. Around them all is short: a coordinator looks, decides and writes in rounds, as
``Reconciler`` does; the node holds one stream and beats, as ``Session`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from bagua.daemon.coordinator.rounds.own_lease import OwnLease
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.coordinator_leases import RESYNC_S, CoordinatorLeases
from bagua.daemon.coordinator.rules.domain import CoordinatorRecord
from bagua.daemon.coordinator.rules.node_leases import NodeLeases
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.node.session.lease import Lease
from bagua.proto import node_pb2
from simulated.loop import VirtualLoop

NAMES = ("a", "b")
OPTIONS = Options()
JOB_LEASE_S = 3.0
BEAT_S = JOB_LEASE_S / 4
HEARTBEAT_S = 3.0
NODE = "node"


class RefusedError(Exception):
    """The port of the database refuses."""


class GivenUpError(Exception):
    """A coordinator has given the node up."""


@dataclass
class Database:
    """Records of coordinators, and the row of the node. ``trouble``: the world's."""

    trouble: set[str]
    records: dict[str, CoordinatorRecord] = field(default_factory=dict)
    node_owner: str | None = None

    @property
    def refuses(self):
        return "refuses" in self.trouble

    async def do(self, name, action):
        """Returns what ``action`` does, as soon as the coordinator ``name`` reaches the database."""
        while True:
            if self.refuses:
                raise RefusedError
            if f"silent for {name}" not in self.trouble:
                return action()
            await asyncio.sleep(0.25)


class Coordinator:
    """One run of it. ``world.coordinators`` has the runs that live."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.clock = ServiceClock(1.0, world.loop.time)
        self.leases = CoordinatorLeases(name, self.clock, OPTIONS.lease_s, JOB_LEASE_S)
        self.node_leases = NodeLeases(True, OPTIONS.outage_s, world.loop.time)
        missed_s = OPTIONS.lease_s - 2 * BEAT_S
        self.lease = OwnLease(
            name, self.clock, self.leases, self.node_leases, self._refuses, missed_s, self._put_forward
        )
        self.lease.publish(f"127.0.0.1:{7670 + NAMES.index(name)}", "here")
        self.session = None  # number of the node's stream
        self.introduced = False
        self.gone = False  # the end of a session waits to be written
        self.heard = 0.0  # of the session, or of the node since
        self.connected = False  # the node, here or there, as far as is known

    def _put_forward(self, seconds):
        """As ``Board.put_forward``."""
        if not self.connected:
            self.heard += seconds

    async def _refuses(self):
        return self.world.database.refuses

    async def run(self):
        database, began = self.world.database, self.lease.now()
        held, records = await self._patiently(self._load)
        self.clock.catch_up(max((one.clock for one in records), default=0.0))
        self.heard = self.clock.now()
        self.leases.observe({one.owner: one.clock for one in records})
        self.lease.held_before(began, held)
        self.lease.loaded(began, records)
        asking = asyncio.create_task(self.lease.ask_others(self.ask))
        self.world.coordinators[self.name] = self
        try:
            while True:
                try:
                    await self._round(database)
                except RefusedError:
                    await self.lease.failed()
                    await asyncio.sleep(1.0)
                await asyncio.sleep(RESYNC_S)
                self.clock.tick()
        finally:
            asking.cancel()

    async def _patiently(self, action):
        while True:
            with contextlib.suppress(RefusedError):
                return await self.world.database.do(self.name, action)
            await asyncio.sleep(1.0)

    def _load(self):
        database = self.world.database
        held = [NODE] if database.node_owner == self.name else []
        if held:
            database.node_owner = None
        return held, list(database.records.values())

    async def ask(self, others):
        """As ``DatabaseSilence.ask``."""
        await asyncio.sleep(0.1)
        living = {} if "parted" in self.world.trouble else self.world.coordinators
        found = {name: living[name].lease.silent_s for name in others if name in living}
        await asyncio.sleep(0.1)
        return found

    async def _round(self, database):
        began = self.lease.now()

        def look():
            return list(database.records.values()), database.node_owner

        records, owner = await self.lease.await_database(database.do(self.name, look))
        beats = {one.owner: one.clock for one in records}
        alone = self.leases.alone(beats)
        if jump := self.clock.catch_up(max(beats.values(), default=0.0)):
            self._put_forward(jump)
            if self.connected:  # as Sessions.put_forward
                self.heard += jump
            self.leases.put_forward(jump)
        self.leases.observe(beats)
        self.lease.refreshed(began, records, alone)
        if self.session is None:
            self._take_in(owner)
        self._decide()
        announced, now = self.lease.announcement(), self.lease.now()
        gone, came = self.gone, None if self.introduced else self.session
        self.gone = False
        self.lease.writes(now, [NODE] if gone else [])

        def write():
            known = database.records.get(self.name, CoordinatorRecord(self.name))
            database.records[self.name] = replace(announced or known, clock=self.clock.now())
            if gone and database.node_owner == self.name:
                database.node_owner = None
            if came is not None:
                database.node_owner = self.name

        try:
            await self.lease.await_database(database.do(self.name, write))
        except RefusedError:
            self.gone = gone
            raise
        self.lease.wrote(now, announced, [] if came is None else [NODE])
        if came is not None and came == self.session:
            self.introduced = self.connected = True

    def _take_in(self, owner):
        connected = owner not in (None, self.name) and self.leases.lives(owner or "")
        if connected != self.connected:
            self.heard = self._heard_of(owner, connected)
            self.connected = connected

    def _heard_of(self, owner, connected):
        if connected:
            return 0.0
        return self.clock.now() if owner in (None, self.name) else self.leases.heard(owner or "")

    def _decide(self):
        if self.connected or self.session is not None:
            return
        if self.clock.now() >= replace(OPTIONS, arrived_clock=self.lease.arrived_clock).gone_at(self.heard):
            raise GivenUpError(self.name)

    # ---- the node's stream

    def open(self, number):
        self.session, self.introduced = number, False
        return self.terms()

    def terms(self):
        self.heard = self.clock.now()
        return node_pb2.Welcome(lease_s=OPTIONS.lease_s, fence_s=OPTIONS.fence_s, grant=self.grant())

    def grant(self):
        return self.node_leases.grant(NODE)

    def hang_up(self, number):
        if self.session == number:
            self.session, self.gone, self.connected = None, True, False


TROUBLE = {
    "refuse": {"refuses"},
    "silence": {"silent for a", "silent for b"},
    "silence_a": {"silent for a"},
    "silence_b": {"silent for b"},
    "part": {"parted"},  # coordinators don't reach each other
    "cut_a": {"a is cut off"},  # from the node
    "cut_all": {"a is cut off", "b is cut off"},
    "move": {"moved"},  # the node dials the other coordinator
}
"""Begins with an event, and ends with the next one of that name."""
EVENTS = "refuse silence silence_a silence_b restart_a kill_b start_b part cut_a cut_all move wait".split()


class World:
    """``events``: pairs of a pause in seconds and one of EVENTS."""

    def __init__(self, loop):
        self.loop = loop
        self.trouble = set()
        self.database = Database(self.trouble)
        self.coordinators = {}
        self.tasks = {}
        self.lease = Lease(lambda: None)

    async def play(self, events):
        """True if the node's lease was over. Raises AssertionError if a coordinator has given the node up before."""
        for name in NAMES:
            self.start(name)
        node = asyncio.create_task(self.node())
        acting = asyncio.create_task(self._act(events))
        try:
            while not acting.done():
                for task in self.tasks.values():
                    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                        assert isinstance(error, GivenUpError), repr(error)
                        left = self.lease.deadline() - self.loop.time()
                        raise AssertionError(f"{error} gave the node up {left:.1f} s before its lease was over")
                assert not node.done(), repr(node.exception())
                if self.lease.deadline() <= self.loop.time():
                    return True
                await asyncio.sleep(0.1)
            acting.result()
            return False
        finally:
            for task in (node, acting, *self.tasks.values()):
                task.cancel()
            await asyncio.gather(node, acting, *self.tasks.values(), return_exceptions=True)

    async def _act(self, events):
        await asyncio.sleep(15.0)
        for pause, event in events:
            change = TROUBLE.get(event, set())
            (self.trouble.difference_update if self.trouble & change else self.trouble.update)(change)
            if event in ("restart_a", "kill_b"):
                self.kill(event[-1])
            if event in ("restart_a", "start_b"):
                self.start(event[-1])
            await asyncio.sleep(pause)

    def start(self, name):
        if name not in self.tasks:
            self.tasks[name] = asyncio.create_task(Coordinator(self, name).run())

    def kill(self, name):
        if name in self.tasks:
            self.coordinators.pop(name, None)
            self.tasks.pop(name).cancel()

    # ---- the node

    @property
    def home(self):
        """The coordinator that the node dials."""
        return "b" if "moved" in self.trouble else "a"

    def cut(self, name):
        return f"{name} is cut off" in self.trouble

    def reached(self, name):
        return None if self.cut(name) else self.coordinators.get(name)

    async def node(self):
        number = 0
        while True:
            number += 1
            await self._stream(number)
            await self._ask_the_ports()
            await asyncio.sleep(0.5)

    async def _ask_the_ports(self):
        before = self.loop.time()
        if self.lease.asks(before):
            ports = {f"127.0.0.1:{7670 + NAMES.index(name)}": name for name in NAMES}
            asked = {self.home, *(ports[address] for address in self.lease.coordinators)}
            if all(name not in self.tasks and not self.cut(name) for name in asked):
                self.lease.refused(before)

    async def _stream(self, number):
        home = self.home
        coordinator = self.reached(home)
        if coordinator is None:
            return
        self.lease.hello(self.loop.time())
        await asyncio.sleep(0.05)
        if self.reached(home) is not coordinator:
            return
        try:
            terms = coordinator.open(number)
            await asyncio.sleep(0.05)
            self.lease.welcome(terms)
            while True:
                sequence = self.lease.beat(self.loop.time())
                await asyncio.sleep(0.05)
                if self.reached(home) is not coordinator or self.home != home:
                    return
                coordinator.heard = coordinator.clock.now()
                if sequence:
                    self.lease.acknowledged(sequence, coordinator.grant())
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            late = OPTIONS.lease_s if self.cut(home) else 0.1
            self.loop.call_later(late, coordinator.hang_up, number)


def play(events):
    """True if the node's lease was over before the end."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(World(loop).play(events))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
