"""Questions of ranks to the coordinator: they go up the stream, and the answers come down it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable

from bagua.base.errors import UnavailableError
from bagua.proto import common_pb2, node_pb2

ANSWER_S = 30.0
"""An answer may need a search among many trials, on a busy machine."""
_MOST = 100
AWAY = "the coordinator is away"


class Questions:
    """Use from the event loop. ``wake``: there is something to send."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._numbers = itertools.count(1)
        self._to_send: deque[node_pb2.TuneQuestion] = deque()
        self._waiting: dict[int, asyncio.Future[common_pb2.TuneReply]] = {}

    async def ask(self, request: common_pb2.TuneRequest) -> common_pb2.TuneReply:
        """The coordinator's answer. Raises UnavailableError."""
        if len(self._waiting) >= _MOST:
            raise UnavailableError(f"{_MOST} questions wait for the coordinator")
        number = next(self._numbers)
        answer: asyncio.Future[common_pb2.TuneReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._to_send.append(node_pb2.TuneQuestion(request_id=number, request=request))
        self._wake()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"the coordinator did not answer within {ANSWER_S:g} s") from None
        finally:
            self._waiting.pop(number, None)

    def take(self) -> node_pb2.TuneQuestion | None:
        """The next one to send, if somebody still waits for it."""
        while self._to_send:
            question = self._to_send.popleft()
            if question.request_id in self._waiting:
                return question
        return None

    def answer(self, told: node_pb2.TuneAnswer) -> None:
        """One came."""
        waiting = self._waiting.get(told.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(told.reply)

    def drop(self) -> None:
        """The stream ended: no answer comes any more."""
        self._to_send.clear()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UnavailableError(AWAY))
