"""Has the nodes of a job record training steps, and passes on what they send: one ``Tracing`` for each call.

Each node also answers some probes of its clock, before and after, so that all times can be put on this process's
clock. Everything here lives in memory, on the event loop. A node that is away, or goes away, is named in the trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from bagua.base.errors import ConflictError, InvalidRequestError, TooMuchError
from bagua.base.machine_clock import clock_name
from bagua.daemon.coordinator.rules.clock_offsets import SAME, Exchange, offset_during
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState
from bagua.daemon.coordinator.streams.sessions import NodeSession, Sessions
from bagua.proto import common_pb2, job_pb2, node_pb2

DEFAULT_STEPS, MAX_STEPS = 5, 1_000
DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 60.0, 600.0
MAX_SPANS = 500_000  # of a whole trace
MAX_SPANS_OF_SOURCE = 20_000
MAX_TRACES = 4  # That are recorded at the same time
PROBES = 8
PROBE_S = 2.0
GRACE_S = 10.0  # for a node's answer after its time has passed


Reply: TypeAlias = "node_pb2.TraceReply | node_pb2.ClockReply | None"


def check(request: job_pb2.TraceJobRequest) -> tuple[int, float]:
    """Steps and seconds that are asked for. Raises InvalidRequestError."""
    if request.steps > MAX_STEPS:
        raise InvalidRequestError(f"steps: {request.steps} are too many, {MAX_STEPS} is the most. [BG824]")
    seconds = request.timeout_s or DEFAULT_TIMEOUT_S
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequestError(
            f"timeout_s is {request.timeout_s:g}: it must be above 0 and at most {MAX_TIMEOUT_S:g}. [BG824]"
        )
    return request.steps or DEFAULT_STEPS, seconds


def check_runs(job: JobRecord) -> None:
    """Raises ConflictError for a job of which no rank trains now."""
    name = f"Job {job.job_id}"
    if job.state.terminal:
        raise ConflictError(f"{name} has ended ({job.state.name.lower()}): only a job that runs can be traced. [BG824]")
    if job.state is JobState.PENDING:
        raise ConflictError(f"{name} waits for nodes ({job.reason}): trace it when it runs. [BG824]")
    if job.paused:
        raise ConflictError(
            f"{name} is paused: it makes no steps. `bagua job resume {job.job_id}`, then trace it. [BG824]"
        )
    if not job.state.under_way:
        raise ConflictError(f"{name} is {job.state.name.lower()}: trace it when it runs. [BG824]")


@dataclass
class _Node:
    """Node of the job, with its answers."""

    session: NodeSession
    request_id: int = 0
    over: bool = False
    room: int = 0  # for spans
    clock: str = ""
    before: list[Exchange] = field(default_factory=list)
    after: list[Exchange] = field(default_factory=list)


class Tracing:
    """Answer to one call of TraceJob. Read ``chunks`` to the end, then ``close``."""

    def __init__(self, sessions: Sessions, job: JobRecord, steps: int, timeout_s: float) -> None:
        """Begins the trace on all nodes. Raises TooMuchError."""
        if sessions.traces_under_way >= MAX_TRACES:
            raise TooMuchError(f"{MAX_TRACES} traces are being recorded: try again when one of them is over. [BG814]")
        sessions.traces_under_way += 1
        self._sessions = sessions
        self._job = job
        self._steps = steps
        self._timeout_s = timeout_s
        self._parts: asyncio.Queue[common_pb2.TracePart] = asyncio.Queue()
        self._nodes: list[_Node] = []
        self._closed = False
        for node_id in dict.fromkeys(host.node_id for host in job.hosts):
            session = sessions.get(node_id)
            if session is None:
                self._miss(node_id, f"node {node_id} is not connected to this coordinator: nothing comes from it")
            else:
                self._nodes.append(_Node(session))

    def close(self) -> None:
        """Ends what is under way."""
        if self._closed:
            return
        self._closed = True
        self._sessions.traces_under_way -= 1
        for node in self._nodes:
            if node.request_id and not node.over:
                self._end(node)
            self._sessions.close_request(node.request_id)

    async def chunks(self) -> AsyncIterator[job_pb2.TraceChunk]:
        """Parts, then the clocks of all nodes."""
        await self._probe_all(lambda node: node.before)
        sources = len(self._job.hosts) + sum(len(host.ranks) for host in self._job.hosts)
        most = max(100, min(MAX_SPANS_OF_SOURCE, MAX_SPANS // max(1, sources)))
        for node in self._nodes:
            self._start(node, most, sources)
        deadline = asyncio.get_running_loop().time() + self._timeout_s + GRACE_S
        while not (self._parts.empty() and all(node.over for node in self._nodes)):
            try:
                async with asyncio.timeout_at(deadline):
                    yield job_pb2.TraceChunk(part=await self._parts.get())
            except TimeoutError:
                for node in self._nodes:
                    if not node.over:
                        self._miss(node.session.node_id, f"node {node.session.node_id} did not answer in time")
                        self._end(node)
        await self._probe_all(lambda node: node.after)
        for node in self._nodes:
            yield job_pb2.TraceChunk(clock=self._clock(node))

    def _miss(self, node_id: str, words: str) -> None:
        self._parts.put_nowait(common_pb2.TracePart(node_id=node_id, rank=-1, missing=words))

    def _start(self, node: _Node, most: int, sources: int) -> None:
        node.room = most * sources

        def sink(reply: Reply) -> None:
            if isinstance(reply, node_pb2.TraceReply):
                node.room -= len(reply.part.spans)
                if node.room < 0:
                    self._miss(node.session.node_id, f"node {node.session.node_id} sent more than it was asked for")
                    self._end(node)
                    return
                self._parts.put_nowait(reply.part)
                node.over = node.over or reply.last
            elif reply is None and not node.over:
                self._miss(node.session.node_id, f"node {node.session.node_id} has lost its connection meanwhile")
                node.over = True

        node.request_id = self._sessions.open_request(node.session, sink)
        node.session.send(
            node_pb2.Directive(
                trace=node_pb2.StartTrace(
                    request_id=node.request_id,
                    job_id=self._job.job_id,
                    steps=self._steps,
                    timeout_s=self._timeout_s,
                    max_spans=most,
                )
            )
        )

    def _end(self, node: _Node) -> None:
        node.over = True
        self._sessions.close_request(node.request_id)
        node.session.send(node_pb2.Directive(end_trace=node_pb2.EndTrace(request_id=node.request_id)))

    # ---- clocks

    async def _probe_all(self, into: Callable[[_Node], list[Exchange]]) -> None:
        await asyncio.gather(*(self._probe(node, into(node)) for node in self._nodes))

    async def _probe(self, node: _Node, into: list[Exchange]) -> None:
        """Asks for the node's time, again and again; gives up when it does not answer."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(PROBE_S):
                for _ in range(PROBES):
                    into.append(await self._exchange(node))
                    if node.clock and node.clock == clock_name():
                        return

    async def _exchange(self, node: _Node) -> Exchange:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[int, node_pb2.ClockReply]] = loop.create_future()

        def sink(reply: Reply) -> None:
            if answer.done():  # a late answer, or the end of the session
                return
            if isinstance(reply, node_pb2.ClockReply):
                answer.set_result((time.monotonic_ns(), reply))
            else:
                answer.set_exception(ConnectionError())

        number = self._sessions.open_request(node.session, sink)
        try:
            sent = time.monotonic_ns()
            node.session.send(node_pb2.Directive(clock=node_pb2.ClockProbe(request_id=number)))
            came, reply = await answer
        finally:
            self._sessions.close_request(number)
        node.clock = reply.clock
        return Exchange(sent, reply.monotonic_ns, came)

    def _clock(self, node: _Node) -> common_pb2.TraceClock:
        clock = common_pb2.TraceClock(node_id=node.session.node_id)
        if node.clock and node.clock == clock_name():
            offset = SAME
        elif node.before or node.after:
            # Nodes that share a clock get one offset, from what all of them have found: their events stay in order.
            sharing = [one for one in self._nodes if one.clock and one.clock == node.clock] or [node]
            before = [exchange for one in sharing for exchange in one.before]
            offset = offset_during(before, [exchange for one in sharing for exchange in one.after])
        else:
            clock.missing = f"node {node.session.node_id} did not tell its time: its events are not on their clock"
            return clock
        clock.offset_ns, clock.bound_ns = offset.ns, offset.bound
        return clock
