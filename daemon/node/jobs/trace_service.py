"""Records training steps of a job that runs here, when the coordinator asks for it: local ranks and the engine.

One trace of a job at a time. A rank that does not answer does not block: when the time has passed, or the job ends,
what has come by then is sent, with words about what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bagua.daemon.node.jobs.job import Job
from bagua.daemon.node.jobs.jobs import EndedJob, Jobs
from bagua.daemon.node.logs.service import Requests, Send
from bagua.daemon.node.rules.state import Rank, RankPhase
from bagua.proto import common_pb2, node_pb2, rank_pb2

MAX_STEPS = 1_000
MAX_SPANS = 20_000  # of a rank, and of the engine
MAX_TIMEOUT_S = 600.0
AT_ONCE = 2_000  # Spans of one message: 150 KiB at most
STEPS_BITS = 16  # of the word that ranks see
_LOOK_S = 0.25
_GRACE_S = 1.0  # for ranks that see in their next step that the time has passed


@dataclass
class _Source:
    """Source of spans: one rank."""

    spans: list[common_pb2.TraceSpan] = field(default_factory=list)
    rank: int = 0
    steps: int = 0
    dropped: int = 0
    done: bool = False


class _Collection:
    """Trace that the ranks of one job record together."""

    def __init__(self, number: int, most: int) -> None:
        self.number = number
        self.most = most
        self.sources: dict[int, _Source] = {}  # by member
        self.changed = asyncio.Event()

    def add(self, report: rank_pb2.TraceReport) -> None:
        source = self.sources.setdefault(report.rank, _Source())
        room = max(0, self.most - len(source.spans))
        source.spans.extend(report.spans[:room])
        source.dropped += report.dropped + max(0, len(report.spans) - room)
        source.rank, source.steps = report.number, max(source.steps, report.steps)
        source.done = source.done or report.done
        self.changed.set()

    def done(self, member: int) -> bool:
        return member in self.sources and self.sources[member].done


class TraceService(Requests):
    """``send`` may wait, and so slows this down."""

    def __init__(self, node_id: str, jobs: Jobs, send: Send) -> None:
        super().__init__()
        self._node_id = node_id
        self._jobs = jobs
        self._send = send
        self._collections: dict[str, _Collection] = {}

    def start(self, request: node_pb2.StartTrace) -> None:
        """Begins to record a trace of a job."""
        self.begin(request.request_id, self._answer(request))

    def add(self, report: rank_pb2.TraceReport) -> None:
        """Adds what a rank has recorded to the trace that is being made. What nobody asks for is dropped."""
        collection = self._collections.get(report.job_id)
        if collection is not None and collection.number == report.request:
            collection.add(report)

    async def _answer(self, request: node_pb2.StartTrace) -> None:
        job = self._jobs.find(request.job_id)
        refusal = self._refusal(request.job_id, job)
        if refusal or not isinstance(job, Job):
            parts = [self._part(rank=-1, missing=refusal)]
        else:
            parts = await self._record(request, job)
        for number, part in enumerate(parts, 1):
            reply = node_pb2.TraceReply(request_id=request.request_id, part=part, last=number == len(parts))
            await self._send(node_pb2.NodeFact(trace=reply))

    def _refusal(self, job_id: str, job: Job | EndedJob | None) -> str:
        if not isinstance(job, Job) or job.ending or job.engine.native is None:
            return f"job {job_id} does not run on node {self._node_id} now"
        if job_id in self._collections:
            return f"another trace of job {job_id} is being recorded on node {self._node_id}: try again when it is over"
        return ""

    async def _record(self, request: node_pb2.StartTrace, job: Job) -> list[common_pb2.TracePart]:
        steps = min(max(1, request.steps), MAX_STEPS)
        limit_s = min(request.timeout_s, MAX_TIMEOUT_S)
        most = min(request.max_spans or MAX_SPANS, MAX_SPANS)
        collection = _Collection(secrets.randbits(40) + 1, most)  # not 0, by which ranks see that nothing is wanted
        self._collections[job.job_id] = collection
        spans: list[Any] = []
        dropped = 0
        try:
            job.engine.start_trace(collection.number << STEPS_BITS | steps, most)
            try:
                await self._until_done(job, collection, limit_s)
            finally:
                waits = job.describe_waits()
                spans, dropped = job.engine.stop_trace()
            await self._until_done(job, collection, _GRACE_S)
        finally:
            del self._collections[job.job_id]
        parts = [
            part
            for rank in job.state.present
            if not rank.outside
            for part in self._rank_parts(rank, collection, steps, limit_s, waits)
        ]
        hosts = [host.node_id for host in job.engine.present.hosts]
        parts += self._cut(map(_span, spans), rank=-1, dropped=dropped, hosts=hosts)
        return parts

    async def _until_done(self, job: Job, collection: _Collection, limit_s: float) -> None:
        """Returns when all ranks that can still answer have done so, the job ends, or the time has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not job.ending and not all(
                    collection.done(rank.member) or rank.phase is RankPhase.EXITED or rank.left
                    for rank in job.state.present
                    if not rank.outside
                ):
                    collection.changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):  # ends of ranks and of the job wake nobody here
                            await collection.changed.wait()

    def _rank_parts(
        self, rank: Rank, collection: _Collection, steps: int, limit_s: float, waits: str
    ) -> Iterator[common_pb2.TracePart]:
        source = collection.sources.get(rank.member, _Source(rank=rank.rank))
        missing = ""
        if source.steps < steps:
            missing = f"rank {rank.rank} recorded {source.steps} of {steps} steps"
            if rank.phase is RankPhase.EXITED or rank.left:
                missing += ", then its process ended"
            elif not source.done:
                missing += f" in {limit_s:g} s: it computes for long, waits, or trains no model that Bagua has wrapped"
                missing += f". {waits}" if waits else ""
        yield from self._cut(
            source.spans, rank=source.rank, member=rank.member, dropped=source.dropped, missing=missing
        )

    def _cut(self, spans: Iterable[common_pb2.TraceSpan], **fields: Any) -> Iterator[common_pb2.TracePart]:
        """Pieces that fit into messages; the words come with the first."""
        left = list(spans)
        yield self._part(spans=left[:AT_ONCE], **fields)
        for begin in range(AT_ONCE, len(left), AT_ONCE):
            yield self._part(spans=left[begin : begin + AT_ONCE], rank=fields["rank"], member=fields.get("member", 0))

    def _part(self, **fields: Any) -> common_pb2.TracePart:
        return common_pb2.TracePart(node_id=self._node_id, hostname=socket.gethostname(), **fields)


def _span(told: tuple[str, str, int, int, int, int, int, int]) -> common_pb2.TraceSpan:
    """Makes the message of a span from ``Engine.stop_trace``."""
    phase, name, comm, sequence, begin, end, peer, size = told
    return common_pb2.TraceSpan(
        phase=phase, name=name, comm=comm, sequence=sequence, begin_ns=begin, end_ns=end, peer=peer, bytes=size
    )
