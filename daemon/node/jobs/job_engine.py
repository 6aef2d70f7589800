"""The engine of one job on this node: made, taken from generation to generation, closed. Its news become events."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bagua.base.address import join_address
from bagua.daemon.node.jobs.context import NodeContext
from bagua.daemon.node.jobs.engine_host import in_thread
from bagua.daemon.node.ranks.runtime_dir import data_socket, remove_sockets
from bagua.daemon.node.rules import events
from bagua.daemon.node.rules.job_specification import JobSpecification

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from bagua.csrc import core


class JobEngine:
    """``on_event`` gets what the engine tells, as events of the state machine.

    ``born``: it takes the place of an engine that was made in that generation and died with the daemon. Its ranks come
    back to the same socket, and nothing happens in that generation any more."""

    def __init__(
        self,
        spec: JobSpecification,
        node: NodeContext,
        log: FilteringBoundLogger,
        on_event: Callable[[events.Event], None],
        born: int = 0,
    ) -> None:
        self.born = born or spec.generation  # the generation in which the first engine of the job was made here
        self.data_socket = data_socket(node.places.of(spec.job_id).folder, spec.job_id, self.born)
        self.present = spec  # of the generation that the engine is in
        self._node = node
        self._log = log
        self._on_event = on_event
        self._engine: core.Engine | None = None
        self._fence_ns = 0
        self._failed = False
        self._orphaned = born > 0
        self._told = spec.generation
        self._later = {spec.generation: spec}  # generations that the engine was told of, from the present one on
        self._changing = asyncio.Lock()

    async def make(self, core: Any, spec: JobSpecification, tokens: dict[int, bytes], rank_uid: int = -1) -> str:
        """Makes the engine in the generation of ``spec``; where this host has newcomers alone, with these in a lobby.
        Returns the address at which other hosts reach it. ``rank_uid``: user of the ranks, -1: the daemon's. Raises
        core.CoreError or OSError."""
        self.data_socket.unlink(missing_ok=True)  # of a daemon that was killed
        alone = spec.host_index < 0
        hosts = spec.world_alone() if alone else tuple(host.ranks for host in spec.hosts)
        elastic = {"elastic": True, "members": spec.joining if alone else spec.all_members} if spec.elastic else {}
        memory = self._node.keeper.memory(spec.job_id)
        try:
            self._engine = await in_thread(
                lambda: core.Engine(
                    job_id=spec.job_id,
                    generation=spec.generation,
                    host_index=max(0, spec.host_index),
                    hosts=[list(ranks) for ranks in hosts],
                    data_socket=str(self.data_socket),
                    tokens=tokens,
                    job_key=spec.job_key,
                    listen=join_address(self._node.data_host, 0),
                    measure_ring=self._node.wire.measure_ring,
                    encryption=self._node.wire.encryption,
                    memory=memory,
                    rank_uid=rank_uid,
                    newcomers=alone,
                    **elastic,
                )
            )
        finally:
            os.close(memory)  # the engine has a copy of its own
        assert self._engine is not None
        self._engine.set_fence(self._fence_ns)
        self._node.refused_frames.add(self._engine)
        asyncio.get_running_loop().add_reader(self._engine.event_fd(), self.drain_events)
        return self._engine.address()

    @property
    def native(self) -> core.Engine | None:
        """The native engine; None before it is made and after its end."""
        return self._engine

    def waiting(self, longer_than_s: float) -> str:
        return self._engine.waiting(longer_than_s) if self._engine is not None else ""

    def step_s(self) -> float:
        return self._engine.step_s() if self._engine is not None else 0.0

    def set_fence(self, at: float) -> None:
        """Ranks stop themselves at that time of ``boottime``, if nobody else could; inf: never."""
        self._fence_ns = 0 if math.isinf(at) else max(1, int(at * 1e9))  # 0 is never
        if self._engine is not None:
            self._engine.set_fence(self._fence_ns)

    def start_trace(self, request: int, most: int) -> None:
        if self._engine is not None:
            self._engine.start_trace(request=request, most=most)

    def stop_trace(self) -> tuple[list[tuple[str, str, int, int, int, int, int, int]], int]:
        """Returns spans, and how many there was no room for."""
        return self._engine.stop_trace() if self._engine is not None else ([], 0)

    def abort(self, reason: str) -> None:
        """Fails all operations, with this reason."""
        if self._engine is not None:
            self._engine.abort(reason)

    def withdraw(self, reason: str) -> None:
        """This host ends its part, for this reason. Elastic jobs go on elsewhere."""
        if self._engine is not None:
            self._engine.withdraw(reason)

    def set_peers(self, generation: int, addresses: tuple[str, ...]) -> None:
        """Tells the engine where the engines of all hosts of a generation are. For a generation that it is not in yet,
        ``follow`` does.
        """
        if self._engine is None or self._orphaned or generation != self.present.generation:
            return
        try:
            self._engine.set_peers(list(addresses))
        except (RuntimeError, ValueError) as error:
            text = f"node {self._node.node_id}: the other hosts can't be reached: {error}"
            self._on_event(events.EngineFailed(text))

    async def follow(self, newest: Callable[[], tuple[JobSpecification, tuple[str, ...]]]) -> None:
        """Goes over to the newest generation, which ``newest`` tells with the addresses of its engines: others may have
        been decided while an older one was being formed. One that is planned is entered when the ranks are there."""
        async with self._changing:
            engine, (spec, peers) = self._engine, newest()
            if engine is None or spec.generation <= self._told or (spec.host_index < 0 and spec.joining):
                return
            if self._orphaned and spec.planned:  # ranks may have a step to repeat, in a generation of their own
                return
            self._later[spec.generation] = spec
            try:
                if spec.planned:
                    await in_thread(lambda: _plan(engine, spec, peers))
                else:
                    await in_thread(lambda: engine.regroup(**_generation(spec)))
            except (RuntimeError, ValueError, OSError) as error:
                self._on_event(events.EngineFailed(f"node {self._node.node_id} can't regroup: {error}"))
                return
            self._told = spec.generation
            if not spec.planned:
                self._orphaned = False
                self._entered(spec.generation)
                now, peers = newest()  # the same generation may have been told again meanwhile, with other newcomers
                if peers:
                    self.set_peers(now.generation, peers)

    async def open_lobby(self, tokens: dict[int, bytes]) -> None:
        """Lets newcomers in, beside the generation that goes on. Raises core.CoreError."""
        async with self._changing:
            if (engine := self._engine) is not None:
                await in_thread(lambda: engine.open_lobby(members=list(tokens), tokens=tokens))

    def _entered(self, generation: int, passes: int = 0) -> None:
        self.present = self._later.get(generation, self.present)
        self._later = {number: spec for number, spec in self._later.items() if number >= generation}
        self._on_event(events.Entered(generation, self.present.all_members, passes))

    def _node_of(self, generation: int, host: int) -> str:
        hosts = self._later[generation].hosts if generation in self._later else ()
        return hosts[host].node_id if 0 <= host < len(hosts) else ""

    async def close(self) -> None:
        """Returns when it is gone, and its socket."""
        async with self._changing:
            engine, self._engine = self._engine, None
        if engine is not None:
            # Before the close, when the number may be another's.
            asyncio.get_running_loop().remove_reader(engine.event_fd())
            self._node.refused_frames.remove(engine)
            await in_thread(engine.close)
            remove_sockets(self.data_socket.parent, self.data_socket.stem)

    def drain_events(self) -> None:
        """Hands on what has happened by now."""
        if self._engine is None:
            return
        happened = self._engine.events()
        after_error: set[int] = set()  # members that were lost when the engine had failed already
        for event in happened:
            if event["kind"] == "error":
                self._failed = True
            elif event["kind"] == "lost" and self._failed:
                after_error.add(int(event["rank"]))
        for event in sorted(happened, key=lambda event: event["kind"] == "error"):  # who is lost may explain an error
            for translated in self._translate(event, after_error):
                self._on_event(translated)

    def _translate(self, event: dict[str, Any], after_error: set[int]) -> Iterator[events.Event]:
        member, text = int(event.get("rank", -1)), str(event.get("text", ""))
        match event["kind"]:
            case "joined":
                yield events.RankConnected(member)
            case "left":
                yield events.RankLeft(member, time.time())
            case "lost":
                yield events.RankLost(member, text or "its connection broke", time.time(), member in after_error)
            case "failed" | "told_lost" as kind:
                yield events.RankTold(member, text, time.time(), kind == "told_lost")
            case "error":
                host = int(event.get("host", -1))
                yield events.EngineFailed(text, host, self._node_of(self.present.generation, host))
            case "suspended":
                generation, host = int(event["generation"]), int(event["host"])
                accused = tuple(self._node_of(generation, one) for one in event["accused"])
                node = self._node_of(generation, host)
                yield events.Suspended(generation, host, text, node, accused, event["passes"])
            case "regrouped":
                self._entered(int(event["generation"]), event["passes"])
            case "ready_to_join":
                yield events.ReadyToJoin(member)
            case "ring":
                self._log.info("order of the hosts in rings", order=text)
            case "scarce":
                self._log.warning("file descriptors are used up", what=text)


def _plan(engine: core.Engine, spec: JobSpecification, peers: tuple[str, ...]) -> None:
    if spec.hold:
        engine.plan(generation=spec.generation, hold=True)
        return
    engine.plan(**_generation(spec), peers=peers or [engine.address()])  # one host


def _generation(spec: JobSpecification) -> dict[str, Any]:
    return {
        "generation": spec.generation,
        "host_index": spec.host_index,
        "hosts": [list(host.ranks) for host in spec.hosts],
        "members": spec.all_members,
    }
