"""Reads ranks' logs from the nodes, through the nodes' sessions.

The reader sets the pace: a node is asked for as many bytes as there is room for, and again when the reader has taken
half of them. So a reader that takes nothing costs ``WINDOW_BYTES``, and no byte travels twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from bagua.base.errors import InvalidRequestError
from bagua.daemon.coordinator.rules.domain import JobRecord
from bagua.daemon.coordinator.streams.sessions import Sessions
from bagua.proto import common_pb2, job_pb2, node_pb2

WINDOW_BYTES = 256 << 10  # of one call, shared by its ranks
LEAST_WINDOW_BYTES = 4 << 10  # of one rank
MAX_TAIL_LINES = 1_000_000
LOOK_S = 0.5  # between two looks whether a node is back
_QUIET_LOOKS = 6  # a reader is told of a node that is away after so many: most are back by then


def check_tail(request: job_pb2.ReadLogsRequest) -> None:
    """Checks how many lines are asked for. Raises InvalidRequestError."""
    if request.tail_lines > MAX_TAIL_LINES:
        raise InvalidRequestError(
            f"tail_lines: {request.tail_lines} are too many, {MAX_TAIL_LINES} is the most. 0 gives the whole log. "
            "[BG820]"
        )


def asked_ranks(request: job_pb2.ReadLogsRequest, members: Collection[int]) -> Sequence[int]:
    """The ranks that are wanted of a job that has these ``members``. Raises InvalidRequestError."""
    if not request.ranks:
        return sorted(members)
    if len(request.ranks) > len(members):
        raise InvalidRequestError(f"ranks: {len(request.ranks)} were named, the job has {len(members)} ranks. [BG820]")
    wanted = sorted(set(request.ranks))
    unknown = next((rank for rank in wanted if rank not in members), None)
    if unknown is not None:
        raise InvalidRequestError(f"ranks: there is no rank {unknown}, the job has {len(members)} ranks. [BG820]")
    return wanted


@dataclass
class _Stream:
    """Log of one rank."""

    rank: int
    node_id: str
    request_id: int | None = None
    position: int = 0  # the next byte that the reader has not had
    started: bool = False  # a chunk came: ``position`` counts, ``tail_lines`` no longer
    waiting: int = 0  # bytes that came and that the reader has not taken
    done: bool = False
    looks: int = 0  # for its node while that is away


class LogReader:
    """Answer to one call of ReadLogs, once the ranks of ``job`` are placed; ``ranks`` are member numbers. Read
    ``chunks``, then ``close`` it. Where a job is followed, a node that is away is waited for until ``over`` says that
    the job has ended: daemons come back after a network was down, after a restart of theirs, and after one of the
    coordinator.
    """

    def __init__(
        self,
        sessions: Sessions,
        job: JobRecord,
        ranks: Sequence[int],
        request: job_pb2.ReadLogsRequest,
        over: Callable[[], Awaitable[bool]],
    ) -> None:
        self._sessions = sessions
        self._job_id = job.job_id
        self._follow = request.follow
        self._tail_lines = request.tail_lines
        self._over = over
        self._window = max(LEAST_WINDOW_BYTES, WINDOW_BYTES // max(1, len(ranks)))
        self._chunks: deque[tuple[_Stream, common_pb2.LogChunk]] = deque()
        self._wake = asyncio.Event()
        self._next_look = 0.0
        homes, had = job.homes, request.had
        self._streams = [_Stream(rank, homes[rank], position=had.get(rank, 0), started=rank in had) for rank in ranks]
        for stream in self._streams:
            self._open(stream)

    def add(self, homes: Mapping[int, str]) -> None:
        """Follows the job's present members and nodes: those that are new are read, too, from their beginning."""
        known = {stream.rank for stream in self._streams}
        for rank in sorted(homes.keys() - known):
            self._streams.append(_Stream(rank, homes[rank], started=True))
            self._open(self._streams[-1])
            self._wake.set()

    async def chunks(self) -> AsyncIterator[common_pb2.LogChunk]:
        """Yields pieces until every rank's log is at its end; for ever with ``follow`` and a rank that runs."""
        while True:
            while self._chunks:
                stream, chunk = self._chunks.popleft()
                stream.waiting -= len(chunk.data)
                idle = stream.request_id is None and not stream.done and not stream.looks
                if idle and stream.waiting <= self._window // 2:
                    self._open(stream)
                yield chunk
            if all(stream.done for stream in self._streams):
                return
            away = any(stream.looks for stream in self._streams)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S if away else None)
            self._wake.clear()
            if away and asyncio.get_running_loop().time() >= self._next_look:
                await self._look()

    async def _look(self) -> None:
        """Asks nodes that were away again."""
        self._next_look = asyncio.get_running_loop().time() + LOOK_S
        over = await self._over()
        for stream in [stream for stream in self._streams if stream.looks]:
            self._open(stream)
            if stream.looks and over:
                self._fail(stream, f"node {stream.node_id} is not connected: its logs can't be read now")

    def close(self) -> None:
        """Tells the nodes that nobody reads any more."""
        for stream in self._streams:
            self._end_request(stream)

    def _end_request(self, stream: _Stream) -> None:
        if stream.request_id is not None:
            session = self._sessions.close_request(stream.request_id)
            if session is not None:
                session.send(node_pb2.Directive(end_log=node_pb2.EndLog(request_id=stream.request_id)))
            stream.request_id = None

    def _open(self, stream: _Stream) -> None:
        read = node_pb2.ReadLog(
            job_id=self._job_id, rank=stream.rank, follow=self._follow, max_bytes=self._window - stream.waiting
        )
        if stream.started:
            read.offset = stream.position
        else:
            read.tail_lines = self._tail_lines

        def sink(chunk: common_pb2.LogChunk | None) -> None:
            self._take(stream, chunk)

        session = self._sessions.get(stream.node_id)
        if session is not None:
            stream.looks = 0
            stream.request_id = read.request_id = self._sessions.open_request(session, sink)
            session.send(node_pb2.Directive(read_log=read))
        elif self._follow:
            self._miss(stream)
        else:
            self._fail(stream, f"node {stream.node_id} is not connected: its logs can't be read now")

    def _take(self, stream: _Stream, chunk: common_pb2.LogChunk | None) -> None:
        if chunk is None:
            stream.request_id = None
            if self._follow:
                self._miss(stream)
            else:
                self._fail(stream, f"node {stream.node_id} has lost its connection: read again when it is back")
            return
        if stream.waiting + len(chunk.data) > self._window:
            self._end_request(stream)
            self._fail(stream, f"node {stream.node_id} sends more than it was asked for: is its version another one?")
            return
        stream.done = chunk.eof or bool(chunk.error)
        if (stream.done or chunk.more) and stream.request_id is not None:
            self._sessions.close_request(stream.request_id)
            stream.request_id = None
        if chunk.data or chunk.missing:
            stream.started, stream.position = True, chunk.offset + len(chunk.data)
        if chunk.data or chunk.missing or stream.done:
            self._put(stream, chunk)

    def _put(self, stream: _Stream, chunk: common_pb2.LogChunk) -> None:
        chunk.rank, chunk.eof, chunk.more = stream.rank, stream.done, False
        stream.waiting += len(chunk.data)
        self._chunks.append((stream, chunk))
        self._wake.set()

    def _miss(self, stream: _Stream) -> None:
        """Notes that the rank's node is away, and may come back."""
        stream.looks += 1
        if stream.looks == 1:
            self._next_look = asyncio.get_running_loop().time() + LOOK_S
            self._wake.set()
        elif stream.looks == _QUIET_LOOKS:
            words = f"node {stream.node_id} is not connected: the rest comes when it is back"
            self._put(stream, common_pb2.LogChunk(offset=stream.position, error=words))

    def _fail(self, stream: _Stream, text: str) -> None:
        stream.done, stream.looks = True, 0
        self._put(stream, common_pb2.LogChunk(offset=stream.position, error=text))
