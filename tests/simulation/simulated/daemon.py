"""A node daemon as the coordinator sees it, with the real lease: it runs nothing, but knows what would be running."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bagua.daemon.node.lease import Lease
from bagua.proto import common_pb2, node_pb2
from simulated.network import Link, Stream

HEARTBEAT_S = 4.0
KEEPALIVE_S = 6.0  # so long without a sign from the other side, and a daemon gives its stream up
WELCOME_S = 10.0
NUMBERED = True  # streams tell which of them is the youngest

WAITING, RUNNING, EXITED = (
    common_pb2.RANK_STATE_WAITING,
    common_pb2.RANK_STATE_RUNNING,
    common_pb2.RANK_STATE_EXITED,
)
STOPPED = node_pb2.LOCAL_PHASE_STOPPED


@dataclass
class Part:
    """One node's part of a job."""

    fact: node_pb2.LocalJob
    computing: bool = False  # ranks are alive
    ended_well: bool = False
    dirty: bool = True  # the coordinator may not know all of it
    elastic: bool = False
    nodes: tuple[str, ...] = ()  # of this generation, by index
    token: object = field(default_factory=object)


class SimulatedDaemon:
    """``net`` gives streams: None while nobody listens. ``on_death`` hears of elastic parts that end while others go
    on."""

    def __init__(
        self, node_id: str, slots: int, rng: random.Random, net: Any, on_death: Callable[[str, str, Part], None]
    ) -> None:
        self.node_id = node_id
        self.slots = slots
        self._rng = rng
        self._net = net
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self.link = Link(self._loop)
        self.frozen_until = 0.0
        self.boots = 0
        self.parts: dict[str, Part] = {}
        self.history: list[tuple[str, Part]] = []
        self.stream: Stream | None = None
        self.connected = False
        self._task: asyncio.Task[None] | None = None
        self._start()

    # ---- what happens to it

    def _start(self) -> None:
        self.boots += 1
        self.boot_id = f"{self.node_id}/{self.boots}"
        self._streams = 0
        self.parts = {}
        self.lease = Lease(self._arm)
        self._fence: asyncio.TimerHandle | None = None
        self._task = self._loop.create_task(self._run())

    def kill(self) -> None:
        """SIGKILL: its ranks die with it."""
        assert self._task is not None
        self._task.cancel()
        self._task = None
        if self._fence is not None:
            self._fence.cancel()
        for job_id, part in self.parts.items():
            self._die(job_id, part)
        self.connected = False
        if self.stream is not None:
            self.stream.tear()

    def restart(self) -> None:
        """A new life."""
        if self._task is None:
            self._start()

    @property
    def alive(self) -> bool:
        return self._task is not None

    def tear(self) -> None:
        """The stream breaks."""
        if self.stream is not None:
            self.stream.tear()

    def rank_ends(self, job_id: str, code: int) -> bool:
        """The ranks of the job end here, well or not. False: none runs."""
        part = self.parts.get(job_id)
        if part is None or not part.computing:
            return False
        self._stop(part, code=code, error="")
        part.ended_well = code == 0
        return True

    # ---- elastic jobs

    def rank_killed(self, job_id: str) -> bool:
        """One rank dies by SIGKILL, and the engine notices. False: none runs here, or the job is not elastic."""
        part = self.parts.get(job_id)
        left = [] if part is None else [rank for rank in part.fact.ranks if rank.state == RUNNING]
        if part is None or not part.elastic or not part.computing or not left:
            return False
        self._end(left[0], -9)
        part.computing = len(left) > 1
        self.suspend(job_id, part.fact.generation, "a rank is gone")
        return True

    def suspend(self, job_id: str, generation: int, text: str, lost: str = "") -> None:
        """The engine of that generation has lost a rank, or the node ``lost``; or others have."""
        part = self.parts.get(job_id)
        if not self.alive or part is None or part.fact.generation != generation or part.fact.phase == STOPPED:
            return
        part.fact.suspended = part.fact.suspended or text
        if lost in part.nodes and part.nodes.index(lost) not in part.fact.suspended_hosts:
            part.fact.suspended_hosts.append(part.nodes.index(lost))
        self._changed(part)

    def _regroup(self, part: Part, run: node_pb2.RunJob) -> None:
        """Members go on; all others have died before."""
        mine = run.hosts[run.host_index]
        part.fact.generation = run.generation
        part.nodes = tuple(host.node_id for host in run.hosts)
        if part.fact.phase != STOPPED:
            held = {rank.member: rank for rank in part.fact.ranks}
            assert held.keys() >= set(mine.members)
            staying = [held[member] for member in mine.members]
            for number, rank in zip(mine.ranks, staying, strict=True):
                rank.rank = number
            del part.fact.ranks[:]
            part.fact.ranks.extend(staying)
            part.fact.suspended = ""
            del part.fact.suspended_hosts[:]
        self._changed(part)

    def _die(self, job_id: str, part: Part) -> None:
        if part.elastic and part.fact.phase != STOPPED:
            self._on_death(job_id, self.node_id, part)
        part.computing = False

    def _end(self, rank: Any, code: int) -> None:
        rank.state, rank.exit_code, rank.signal = EXITED, code, max(0, -code)
        rank.exited_at = self._loop.time()

    # ---- its life

    async def _run(self) -> None:
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

    async def _talk(self, stream: Stream) -> None:
        await self._thawed()
        self.lease.hello(self._loop.time())
        self._streams += 1
        hello = node_pb2.Hello(
            stream=self._streams if NUMBERED else 0,
            node_id=self.node_id,
            hostname=self.node_id,
            address="127.0.0.1",
            slots=self.slots,
            version="sim",
            boot_id=self.boot_id,
            jobs=[part.fact for part in self.parts.values()],
        )
        stream.say(node_pb2.NodeFact(hello=hello))
        for part in self.parts.values():
            part.dirty = False
        async with asyncio.timeout(WELCOME_S):
            first = await self._next(stream)
        if first.WhichOneof("directive") != "welcome":
            raise EOFError
        self.lease.welcome(first.welcome)
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

    async def _next(self, stream: Stream) -> node_pb2.Directive:
        """Raises EOFError at the end of the stream."""
        found = await stream.down.take()
        if self._loop.time() < self.frozen_until:
            await self._thawed()
        if found is None:
            raise EOFError
        return node_pb2.Directive.FromString(found) if isinstance(found, bytes) else found

    async def _thawed(self) -> None:
        while self._loop.time() < self.frozen_until:
            await asyncio.sleep(self.frozen_until - self._loop.time())

    async def _beat(self, stream: Stream) -> None:
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

    def _follow(self, directive: node_pb2.Directive) -> None:
        kind = directive.WhichOneof("directive")
        if kind == "ack":
            self.lease.acknowledged(directive.ack.seq)
        elif kind == "run":
            if self._loop.time() < self.lease.deadline:
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
            self._changed(part)

    def _begin(self, run: node_pb2.RunJob) -> None:
        held = self.parts.get(run.job_id)
        if held is not None and held.fact.generation >= run.generation:
            self._changed(held)
            return
        if held is not None and held.elastic:
            self._regroup(held, run)
            return
        assert held is None or not held.computing
        mine = run.hosts[run.host_index]
        assert mine.node_id == self.node_id
        fact = node_pb2.LocalJob(job_id=run.job_id, generation=run.generation, phase=node_pb2.LOCAL_PHASE_PREPARING)
        part = self.parts[run.job_id] = Part(fact, elastic=run.spec.elastic)
        part.nodes = tuple(host.node_id for host in run.hosts)
        if part.elastic and run.generation > 1:  # an earlier life of this daemon had it
            fact.phase = STOPPED
            self._changed(part)
            return
        for rank in mine.ranks:
            fact.ranks.add(rank=rank, node_id=self.node_id, state=WAITING, member=rank)
        self.history.append((run.job_id, part))
        self._changed(part)
        self._loop.call_later(self._rng.uniform(0.0, 2.0), self._started, part, self.boot_id)

    def _started(self, part: Part, boot_id: str) -> None:
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
        self._changed(part)

    def _stop_if(self, part: Part, token: object) -> None:
        if part.token is token and part.fact.phase != STOPPED and self.alive:
            self._stop(part, code=-15, error="")

    def _stop(self, part: Part, code: int, error: str) -> None:
        part.computing = False
        part.fact.phase = STOPPED
        part.fact.error = part.fact.error or error
        for rank in part.fact.ranks:
            if rank.state != EXITED:
                self._end(rank, code)
        self._changed(part)

    def _changed(self, part: Part) -> None:
        part.dirty = True
        self._loop.call_soon(self._report)

    def _report(self) -> None:
        """Sends what has changed, when there is a way."""
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

    def _arm(self) -> None:
        if self._fence is not None:
            self._fence.cancel()
        deadline = self.lease.deadline
        if deadline < float("inf"):
            self._fence = self._loop.call_at(deadline, self._over)

    def _over(self) -> None:
        for job_id, part in self.parts.items():
            if part.fact.phase != STOPPED:
                self._die(job_id, part)
                part.fact.withdrawn = True
                self._stop(part, code=-9, error="could not reach the coordinator")
