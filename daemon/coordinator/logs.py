"""Reading logs of ranks, which lie on the nodes, through the nodes' sessions.

A reader that is slower than the nodes makes them pause: when ``HIGH_BYTES`` wait, a rank's stream is ended, and asked
for again from where it was once the reader has caught up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from bagua.daemon.coordinator.domain import JobRecord
from bagua.daemon.coordinator.sessions import Sessions
from bagua.proto import common_pb2, node_pb2

HIGH_BYTES = 8 << 20
LOW_BYTES = 1 << 20


@dataclass
class _Stream:
    """One rank."""

    rank: int
    node_id: str
    request_id: int | None = None
    position: int = 0  # the next byte that the reader has not had
    started: bool = False  # a chunk came: ``position`` counts, ``tail_lines`` no longer
    paused: bool = False
    done: bool = False


class LogReader:
    """One call of ReadLogs, once the ranks of ``job`` are placed. Read ``chunks``, then ``close`` it."""

    def __init__(self, sessions: Sessions, job: JobRecord, ranks: Iterable[int], follow: bool, tail_lines: int) -> None:
        self._sessions = sessions
        self._job_id = job.job_id
        self._follow = follow
        self._tail_lines = tail_lines
        self._chunks: deque[common_pb2.LogChunk] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._streams = [_Stream(rank, job.ranks[rank].node_id) for rank in ranks]
        for stream in self._streams:
            self._open(stream)

    async def chunks(self) -> AsyncIterator[common_pb2.LogChunk]:
        """Until every rank's log is at its end; for ever with ``follow`` and a rank that runs."""
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._bytes -= len(chunk.data)
                self._resume()
                yield chunk
            if all(stream.done for stream in self._streams):
                return
            await self._wake.wait()
            self._wake.clear()

    def close(self) -> None:
        """Tells the nodes that nobody reads any more."""
        for stream in self._streams:
            if stream.request_id is not None:
                self._sessions.end_log(stream.request_id)
                stream.request_id = None

    def _open(self, stream: _Stream) -> None:
        read = node_pb2.ReadLog(job_id=self._job_id, rank=stream.rank, follow=self._follow)
        if stream.started:
            read.offset = stream.position
        else:
            read.tail_lines = self._tail_lines

        def sink(chunk: common_pb2.LogChunk | None) -> None:
            self._take(stream, chunk)

        stream.paused = False
        stream.request_id = self._sessions.open_log(stream.node_id, read, sink)
        if stream.request_id is None:
            self._fail(stream, f"node {stream.node_id} is not connected: its logs can't be read now")

    def _take(self, stream: _Stream, chunk: common_pb2.LogChunk | None) -> None:
        if chunk is None:
            stream.request_id = None
            self._fail(stream, f"node {stream.node_id} has lost its connection: read again when it is back")
            return
        if chunk.eof or chunk.error:
            stream.request_id = None
            stream.done = True
        elif self._bytes + len(chunk.data) > HIGH_BYTES and stream.request_id is not None:
            self._sessions.end_log(stream.request_id)
            stream.request_id = None
            stream.paused = True
            if not stream.started:
                stream.started, stream.position = True, chunk.offset
            return
        self._put(stream, chunk)

    def _put(self, stream: _Stream, chunk: common_pb2.LogChunk) -> None:
        data, offset = chunk.data, chunk.offset
        if stream.started and offset < stream.position:  # had already
            data = data[stream.position - offset :]
            offset = min(stream.position, chunk.offset + len(chunk.data))
        if data:
            stream.started, stream.position = True, offset + len(data)
        if data or stream.done:
            made = common_pb2.LogChunk(rank=stream.rank, data=data, offset=offset, eof=stream.done, error=chunk.error)
            self._chunks.append(made)
            self._bytes += len(data)
            self._wake.set()

    def _fail(self, stream: _Stream, text: str) -> None:
        stream.done = True
        chunk = common_pb2.LogChunk(rank=stream.rank, offset=stream.position, eof=True, error=text)
        self._chunks.append(chunk)
        self._wake.set()

    def _resume(self) -> None:
        if self._bytes <= LOW_BYTES:
            for stream in self._streams:
                if stream.paused:
                    self._open(stream)
