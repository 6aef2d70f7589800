"""Answers the coordinator's requests, those for logs among them, with one task for each request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from bagua.daemon.node.logs.file import READ_BYTES, LogFile
from bagua.proto import common_pb2, node_pb2

MAX_READERS = 4_096  # each is a task that mostly sleeps
Find = Callable[[node_pb2.ReadLog], Awaitable[LogFile]]
Send = Callable[[node_pb2.NodeFact], Awaitable[None]]


class Requests:
    """Tasks that answer the coordinator's requests, by the number of the request."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        """Begins to answer; a request with an id in use replaces the older one."""
        self.end(request_id)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[request_id] = task
        task.add_done_callback(lambda done: self._forget(request_id, done))

    def end(self, request_id: int) -> None:
        """Ends an answer that nobody wants any more."""
        if task := self._tasks.pop(request_id, None):
            task.cancel()

    def end_all(self) -> None:
        """Ends all answers: the stream that asked is gone."""
        for request_id in list(self._tasks):
            self.end(request_id)

    def _forget(self, request_id: int, done: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is done:  # else a newer one has its number
            del self._tasks[request_id]


class LogService(Requests):
    """``find`` gives the log of a rank, or raises LookupError with words; ``send`` may wait, and so slows the reader
    down."""

    def __init__(self, find: Find, send: Send) -> None:
        super().__init__()
        self._find = find
        self._send = send

    def start(self, request: node_pb2.ReadLog) -> None:
        """Begins to send the log of a rank."""
        if len(self._tasks) >= MAX_READERS:
            work = self._refuse(request, f"more than {MAX_READERS} readers of logs on one node")
        else:
            work = self._answer(request)
        self.begin(request.request_id, work)

    async def _answer(self, request: node_pb2.ReadLog) -> None:
        try:
            log = await self._find(request)
            await self._copy(request, log)
        except (LookupError, OSError) as error:
            await self._refuse(request, str(error.args[0] if isinstance(error, LookupError) else error))

    async def _copy(self, request: node_pb2.ReadLog, log: LogFile) -> None:
        """Sends pieces until the end of the log, or until as much was sent as the reader has room for."""
        offset = request.offset or await log.tail_offset(request.tail_lines)
        room = request.max_bytes or math.inf
        while room > 0:
            piece = await log.read(offset, int(min(READ_BYTES, room)))
            offset, room = piece.end, room - len(piece.data)
            if piece.data or piece.missing:
                await self._send_chunk(
                    request, data=piece.data, offset=piece.offset, missing=piece.missing, more=room <= 0
                )
            elif log.closed or not request.follow:
                await self._send_chunk(request, offset=offset, eof=True)
                return
            else:
                await log.changed(offset)

    async def _send_chunk(self, request: node_pb2.ReadLog, **fields: Any) -> None:
        chunk = common_pb2.LogChunk(rank=request.rank, **fields)
        await self._send(node_pb2.NodeFact(log=node_pb2.LogReply(request_id=request.request_id, chunk=chunk)))

    async def _refuse(self, request: node_pb2.ReadLog, reason: str) -> None:
        await self._send_chunk(request, error=reason, eof=True)
