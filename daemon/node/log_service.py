"""Answers the coordinator's requests for logs: one task for each, told by the writer when there is more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bagua.daemon.node.logs import LogFile
from bagua.proto import common_pb2, node_pb2

MAX_READERS = 256
Find = Callable[[node_pb2.ReadLog], Awaitable[LogFile]]
Send = Callable[[node_pb2.LogReply], Awaitable[None]]


class LogService:
    """``find`` gives the log of a rank, or raises LookupError with words; ``send`` may wait, and so slows the reader
    down."""

    def __init__(self, find: Find, send: Send) -> None:
        self._find = find
        self._send = send
        self._readers: dict[int, asyncio.Task[None]] = {}

    def start(self, request: node_pb2.ReadLog) -> None:
        """Begins to answer; a request with an id in use replaces the older one."""
        self.end(request.request_id)
        if len(self._readers) >= MAX_READERS:
            work = self._refuse(request, f"more than {MAX_READERS} readers of logs on one node")
        else:
            work = self._answer(request)
        task = asyncio.get_running_loop().create_task(work)
        self._readers[request.request_id] = task
        task.add_done_callback(lambda done: self._forget(request.request_id, done))

    def end(self, request_id: int) -> None:
        if task := self._readers.pop(request_id, None):
            task.cancel()

    def end_all(self) -> None:
        """The stream that asked is gone."""
        for request_id in list(self._readers):
            self.end(request_id)

    def _forget(self, request_id: int, done: asyncio.Task[None]) -> None:
        if self._readers.get(request_id) is done:
            del self._readers[request_id]

    async def _answer(self, request: node_pb2.ReadLog) -> None:
        try:
            log = await self._find(request)
            await self._copy(request, log)
        except (LookupError, OSError) as error:
            await self._refuse(request, str(error.args[0] if isinstance(error, LookupError) else error))

    async def _copy(self, request: node_pb2.ReadLog, log: LogFile) -> None:
        offset = request.offset or log.tail_offset(request.tail_lines)
        while True:
            offset, data = log.read(offset)
            if data:
                chunk = common_pb2.LogChunk(rank=request.rank, data=data, offset=offset)
                await self._send(node_pb2.LogReply(request_id=request.request_id, chunk=chunk))
                offset += len(data)
            elif log.closed or not request.follow:
                break
            else:
                await log.changed(offset)
        end = common_pb2.LogChunk(rank=request.rank, offset=offset, eof=True)
        await self._send(node_pb2.LogReply(request_id=request.request_id, chunk=end))

    async def _refuse(self, request: node_pb2.ReadLog, reason: str) -> None:
        chunk = common_pb2.LogChunk(rank=request.rank, error=reason, eof=True)
        await self._send(node_pb2.LogReply(request_id=request.request_id, chunk=chunk))
