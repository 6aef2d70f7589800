"""A node daemon as the coordinator sees it, with the real lease: it runs nothing, but knows what would be running."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field

from bagua.daemon.node.session.lease import Lease
from bagua.proto import common_pb2, node_pb2
from simulated.network import Link

HEARTBEAT_S = 4.0
KEEPALIVE_S = 6.0  # so long without a sign from the other side, and a daemon gives its stream up
WELCOME_S = 10.0
PATIENCE_S = (0.0, 0.0, 10.0, 40.0)  # that nodes may have with a job

WAITING, RUNNING, EXITED = (common_pb2.RANK_STATE_WAITING, common_pb2.RANK_STATE_RUNNING, common_pb2.RANK_STATE_EXITED)
STOPPED = node_pb2.LOCAL_PHASE_STOPPED


@dataclass
class Part:
    """One node's part of a job."""

    fact: node_pb2.LocalJob
    computing: bool = False  # ranks are alive
    ended_well: bool = False
    dirty: bool = True  # the coordinator may not know all of it
    elastic: bool = False
    nodes: tuple[str, ...] = ()  # of the generation that the engine is in
    run: node_pb2.RunJob | None = None  # the newest
    present: frozenset[int] = frozenset()  # members that are in that generation
    known: set[int] = field(default_factory=set)  # members that were ever started here
    boundary: bool = False  # all ranks here have ended their step, and wait
    stepping: bool = False  # a step may be under way, which a loss makes it repeat
    token: object = field(default_factory=object)


class SimulatedDaemon:
    """``net`` gives streams: None while nobody listens. ``on_death`` hears of elastic parts that end while others go
    on."""

    def __init__(self, node_id, slots, rng, net, world):
        self.node_id = node_id
        self.slots = slots
        self._rng = rng
        self._net = net
        self._on_death = world.part_died
        self._training = world.training
        self._loop = asyncio.get_running_loop()
        self.link = Link(self._loop)
        self.frozen_until = 0.0
        self.boots = 0
        self.parts = {}
        self.history = []
        self.stream = None
        self.connected = False
        self._task = None
        self._start()

    # ---- what happens to it

    def _start(self):
        self.boots += 1
        self.boot_id = f"{self.node_id}/{self.boots}"
        self._streams = 0
        self.parts = {}
        self.lease = Lease(self._arm)
        self._fences = []
        self._task = self._loop.create_task(self._run())

    def kill(self):
        """SIGKILL: its ranks die with it."""
        assert self._task is not None
        self._task.cancel()
        self._task = None
        for fence in self._fences:
            fence.cancel()
        for job_id, part in self.parts.items():
            self._die(job_id, part)
        self.connected = False
        if self.stream is not None:
            self.stream.tear()

    def restart(self):
        if self._task is None:
            self._start()

    @property
    def alive(self):
        return self._task is not None

    def tear(self):
        if self.stream is not None:
            self.stream.tear()

    def rank_ends(self, job_id, code):
        """The ranks of the job end here, well or not. False: none runs."""
        part = self.parts.get(job_id)
        if part is None or not part.computing:
            return False
        self._stop(part, code=code, error="")
        part.ended_well = code == 0
        return True

    # ---- elastic jobs

    def rank_killed(self, job_id):
        """One rank dies by SIGKILL, and the engine notices. False: none runs here, or the job is not elastic."""
        part = self.parts.get(job_id)
        left = [] if part is None else [rank for rank in part.fact.ranks if rank.state == RUNNING]
        if part is None or not part.elastic or not part.computing or not left:
            return False
        dead = self._rng.choice(left)
        self._end(dead, -9)
        part.computing = len(left) > 1
        if dead.member in part.present:
            self.suspend(job_id, part.fact.entered, "a rank is gone")
        self.changed(part)
        return dead.member in part.present

    def suspend(self, job_id, entered, text, lost=""):
        """The engine of that generation has lost a rank, or the node ``lost``; or others have."""
        part = self.parts.get(job_id)
        if not self.alive or part is None or part.fact.entered != entered or part.fact.phase == STOPPED or not entered:
            return
        part.fact.suspended = part.fact.suspended or text
        if lost in part.nodes and lost != self.node_id and lost not in part.fact.suspended_nodes:
            part.fact.suspended_nodes.append(lost)
        self.changed(part)
        self._plan(part)  # who is dismissed has nothing to repeat

    def _follow_run(self, part, run):
        """A newer generation of a job that is here, or other newcomers."""
        part.run = run
        self._arm()
        part.fact.generation = run.generation
        mine, lobby = _plans(run, self.node_id)
        wanted = {*mine, *lobby} - (part.present - set(mine) if mine else set())
        if part.present and not mine and not lobby and run.planned:  # dismissed, after the step
            wanted = {rank.member for rank in part.fact.ranks}
        for rank in list(part.fact.ranks):
            if rank.member not in wanted:
                if rank.state != EXITED:
                    self._end(rank, -9)
                if rank.member in part.present and rank.member not in lobby:
                    part.fact.ranks.remove(rank)
        self._add_newcomers(part, [member for member in lobby if member not in part.known])
        if mine and not run.planned and part.fact.entered < run.generation:
            self._enter(part, at_once=True)
        elif not mine and part.present and lobby:  # a plan was overtaken: its newcomers are back in the lobby
            self._back(part)
        self._plan(part)
        if run.planned and part.present:
            self._training.plan_is_known(run.job_id, part.fact.entered)
        self.changed(part)

    def _back(self, part):
        """Into a lobby of its own; or the newcomers are ended, and others come."""
        part.present, part.fact.entered, part.boundary = frozenset(), 0, True
        part.fact.suspended = ""
        del part.fact.suspended_nodes[:]
        if self._rng.random() < 0.5:
            self._stop(part, code=-9, error="")

    def at_boundary(self, part):
        """All ranks here have ended their step, and wait for the next generation."""
        part.boundary = True
        self._plan(part)

    def _plan(self, part):
        """A planned change takes place once everybody here waits for it."""
        run = part.run
        if run is None or not run.planned or run.hold or part.fact.entered >= run.generation or not self.alive:
            return
        mine, lobby = _plans(run, self.node_id)
        if part.fact.phase == STOPPED:
            return
        if not mine and not lobby and part.present and (part.boundary or part.fact.suspended):
            if not part.boundary:  # in the middle of a step: its engine hangs up, also on those that had not noticed
                self._on_death(part.fact.job_id, self.node_id, part)
            self._stop(part, code=0, error="")
        elif mine and (part.boundary or not part.present):
            new = [rank for rank in part.fact.ranks if rank.member in mine and rank.member not in part.present]
            if all(rank.ready_to_join for rank in new) and part.computing:
                self._enter(part, at_once=False)

    def _enter(self, part, at_once):
        run = part.run
        assert run is not None
        mine = run.hosts[run.host_index]
        held = {rank.member: rank for rank in part.fact.ranks}
        if part.fact.phase != STOPPED:
            assert held.keys() >= set(mine.members), (held.keys(), mine.members)
        self._training.enters(self, part, at_once)
        part.present = frozenset(mine.members)
        part.fact.entered = run.generation
        part.boundary = False
        self._learn_steps(part)
        part.nodes = tuple(host.node_id for host in run.hosts)
        for number, member in zip(mine.ranks, mine.members, strict=True):
            if member in held:
                held[member].rank = number
        part.fact.suspended = ""
        del part.fact.suspended_nodes[:]
        self.changed(part)

    def _learn_steps(self, part):
        """In some generations a node finds that steps take long. No random number: it is the same in each history."""
        if part.elastic:
            found = PATIENCE_S[zlib.crc32(f"{part.fact.job_id} {part.fact.entered} {self.node_id}".encode()) % 4]
            part.fact.patience_s = max(part.fact.patience_s, found)

    def slots_of(self, part):
        """Of ranks that are members, or may become members."""
        if part.run is None or not part.elastic:
            return len(part.fact.ranks)
        mine, lobby = _plans(part.run, self.node_id)
        return sum(rank.member in {*mine, *lobby} for rank in part.fact.ranks)

    def newcomers_fail(self, part):
        for rank in part.fact.ranks:
            if rank.state != EXITED:
                self._end(rank, 1)
        part.computing = False
        self._on_death(part.fact.job_id, self.node_id, part)
        self.changed(part)

    def _add_newcomers(self, part, members):
        for number, member in enumerate(members):
            part.fact.ranks.add(rank=number, node_id=self.node_id, state=WAITING, member=member, newcomer=True)
        part.known |= set(members)
        if members:
            self._loop.call_later(self._rng.uniform(0.0, 2.0), self._newcomers_start, part, members, self.boot_id)

    def _newcomers_start(self, part, members, boot_id):
        if boot_id != self.boot_id or not self.alive or part.fact.phase == STOPPED:
            return
        part.fact.phase = node_pb2.LOCAL_PHASE_STARTED
        part.fact.engine_address = "127.0.0.1:1"
        for rank in part.fact.ranks:
            if rank.member in members and rank.state == WAITING:
                rank.state, rank.pid = RUNNING, 1 + rank.member
                part.computing = True
        self._loop.call_later(self._rng.uniform(0.0, 3.0), self._newcomers_ready, part, members, boot_id)
        self.changed(part)

    def _newcomers_ready(self, part, members, boot_id):
        if boot_id != self.boot_id or not self.alive or part.fact.phase == STOPPED:
            return
        fate = self._rng.random() / self._training.clumsy if self._training.clumsy else 1.0
        if fate < 0.1:
            return  # it never gets ready
        for rank in part.fact.ranks:
            if rank.member in members and rank.state == RUNNING:
                if fate < 0.25:
                    self._end(rank, self._rng.choice((0, 1, -9)))
                else:
                    rank.ready_to_join = True
        if not part.present:
            part.boundary = True
            part.computing = any(rank.state == RUNNING for rank in part.fact.ranks)
        self._plan(part)
        self.changed(part)

    def _die(self, job_id, part):
        if part.elastic and part.fact.phase != STOPPED:
            self._on_death(job_id, self.node_id, part)
        part.computing = False

    def _end(self, rank, code):
        rank.state, rank.exit_code, rank.signal = EXITED, code, max(0, -code)
        rank.exited_at = self._loop.time()

    # ---- its life

    async def _run(self):
        while True:
            before = self._loop.time()
            stream = self._net(self)
            if stream is None:
                self.lease.refused(before)
                await asyncio.sleep(self._rng.uniform(0.2, 2.0))
                continue
            if self.link.silent:
                await asyncio.sleep(self.link.silent_until - before)
            self.stream = stream
            try:
                await self._talk(stream)
            except (TimeoutError, EOFError):
                pass
            finally:
                self.connected = False
                stream.tear()
            await asyncio.sleep(self._rng.uniform(0.1, 2.0))

    async def _talk(self, stream):
        await self._thawed()
        self.lease.hello(self._loop.time())
        self._streams += 1
        hello = node_pb2.Hello(
            stream=self._streams,
            node_id=self.node_id,
            hostname=self.node_id,
            address="127.0.0.1",
            slots=self.slots,
            version="sim",
            boot_id=self.boot_id,
            waits=ord(self.node_id[-1]) % 2 == 0,  # half of them are of the version before
            jobs=[part.fact for part in self.parts.values()],
        )
        stream.say(node_pb2.NodeFact(hello=hello))
        for part in self.parts.values():
            part.dirty = False
        async with asyncio.timeout(WELCOME_S):
            first = await self._next(stream)
        kind = first.WhichOneof("directive")
        if kind not in ("welcome", "terms"):
            raise EOFError
        self.lease.welcome(getattr(first, kind))
        if kind == "welcome":
            self.connected = True
            self._report()
        beat = self._loop.create_task(self._beat(stream))
        try:
            while True:
                self._follow(await self._next(stream))
                if stream.down.ended and not stream.down._items:
                    return
        finally:
            beat.cancel()

    async def _next(self, stream):
        found = await stream.down.take()
        if self._loop.time() < self.frozen_until:
            await self._thawed()
        if found is None:
            raise EOFError
        return node_pb2.Directive.FromString(found) if isinstance(found, bytes) else found

    async def _thawed(self):
        while self._loop.time() < self.frozen_until:
            await asyncio.sleep(self.frozen_until - self._loop.time())

    async def _beat(self, stream):
        heard_at = self._loop.time()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._thawed()
            now = self._loop.time()
            stream.say(node_pb2.NodeFact(heartbeat=node_pb2.Heartbeat(seq=self.lease.beat(now))))
            if not stream.silent:
                heard_at = now
            elif now >= heard_at + KEEPALIVE_S:
                stream.tear()
                return

    # ---- jobs

    def _follow(self, directive):
        kind = directive.WhichOneof("directive")
        if kind == "welcome":  # after terms
            self.lease.welcome(directive.welcome)
            self.connected = True
            self._report()
        elif kind == "ack":
            self.lease.acknowledged(directive.ack.seq)
        elif kind == "run":
            held = self.parts.get(directive.run.job_id)
            if self._loop.time() < self._deadline(None if held is None else held.run):
                self._begin(directive.run)
        elif kind == "stop":
            part = self.parts.get(directive.stop.job_id)
            if part is None:
                fact = node_pb2.LocalJob(job_id=directive.stop.job_id, generation=directive.stop.generation)
                fact.phase = STOPPED
                self.parts[directive.stop.job_id] = part = Part(fact)
            elif part.fact.phase != STOPPED and directive.stop.generation >= part.fact.generation:
                token = part.token
                self._loop.call_later(self._rng.uniform(0.0, 1.0), self._stop_if, part, token)
            self.changed(part)

    def _begin(self, run):
        held = self.parts.get(run.job_id)
        mine, lobby = _plans(run, self.node_id)
        anew = held is not None and held.fact.phase == STOPPED and not held.computing
        if anew and held is not None and held.elastic and lobby and not held.known & set(lobby):
            held = None
        if held is not None and held.elastic and held.run is not None and run.generation >= held.fact.generation:
            if held.fact.phase == STOPPED:
                held.fact.generation = run.generation
                self.changed(held)
            else:
                self._follow_run(held, run)
            return
        if held is not None and held.fact.generation >= run.generation:
            self.changed(held)
            return
        assert held is None or not held.computing
        fact = node_pb2.LocalJob(job_id=run.job_id, generation=run.generation, phase=node_pb2.LOCAL_PHASE_PREPARING)
        fact.takes_newcomers = "takes" in run.spec.args
        part = self.parts[run.job_id] = Part(fact, elastic=run.spec.elastic, run=run)
        self._arm()
        if lobby:
            self.history.append((run.job_id, part))
            self._add_newcomers(part, lobby)
            self.changed(part)
            return
        part.nodes = tuple(host.node_id for host in run.hosts)
        if part.elastic and run.generation > 1:  # an earlier life of this daemon had it, and may be dismissed by now
            fact.phase = STOPPED
            self.changed(part)
            return
        assert run.hosts[run.host_index].node_id == self.node_id
        part.present, part.known, part.stepping = frozenset(mine), set(mine), True
        fact.entered = run.generation
        for rank in run.hosts[run.host_index].ranks:
            fact.ranks.add(rank=rank, node_id=self.node_id, state=WAITING, member=rank)
        self.history.append((run.job_id, part))
        self.changed(part)
        self._loop.call_later(self._rng.uniform(0.0, 2.0), self._started, part, self.boot_id)

    def _started(self, part, boot_id):
        if boot_id != self.boot_id or not self.alive or part.fact.phase == STOPPED:
            return
        if self._loop.time() < self.frozen_until:
            self._loop.call_at(self.frozen_until, self._started, part, boot_id)
            return
        part.computing = True
        part.fact.phase = node_pb2.LOCAL_PHASE_STARTED
        part.fact.engine_address = "127.0.0.1:1"
        for rank in part.fact.ranks:
            rank.state, rank.pid = RUNNING, 1 + rank.rank
        self._learn_steps(part)
        self.changed(part)

    def _stop_if(self, part, token):
        if part.token is token and part.fact.phase != STOPPED and self.alive:
            self._stop(part, code=-15, error="")

    def _stop(self, part, code, error):
        part.computing = False
        part.fact.phase = STOPPED
        part.fact.error = part.fact.error or error
        for rank in part.fact.ranks:
            if rank.state != EXITED:
                self._end(rank, code)
        self.changed(part)

    def changed(self, part):
        part.dirty = True
        self._loop.call_soon(self._report)

    def _report(self):
        if not self.connected or self.stream is None:
            return
        if self._loop.time() < self.frozen_until:
            self._loop.call_at(self.frozen_until, self._report)
            return
        for part in self.parts.values():
            if part.dirty:
                part.dirty = False
                self.stream.say(node_pb2.NodeFact(job=part.fact))

    # ---- the fence; the keeper acts also while the daemon is frozen

    def _arm(self):
        for fence in self._fences:
            fence.cancel()
        deadlines = {self._deadline(part.run) for part in self.parts.values() if part.fact.phase != STOPPED}
        self._fences = [self._loop.call_at(at, self._over) for at in sorted(deadlines) if at < float("inf")]

    def _deadline(self, run):
        return self.lease.deadline(0.0 if run is None else run.patience_s)

    def _over(self):
        for job_id, part in self.parts.items():
            if part.fact.phase != STOPPED and self._deadline(part.run) <= self._loop.time():
                self._die(job_id, part)
                part.fact.withdrawn = True
                self._stop(part, code=-9, error="could not reach the coordinator")


NOWHERE = 0xFFFFFFFF


def _plans(run, node_id):
    """(members of the generation, newcomers that prepare) on a node."""
    mine = list(run.hosts[run.host_index].members) if run.host_index != NOWHERE else []
    if run.host_index != NOWHERE and not run.spec.elastic:
        mine = list(run.hosts[run.host_index].ranks)
    return mine, [member for plan in run.joining if plan.node_id == node_id for member in plan.members]
