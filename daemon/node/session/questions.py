"""Questions to the coordinator: they go up the stream, and the answers come down it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from bagua.base.errors import UnavailableError
from bagua.daemon.node.ranks.launch import LaunchError
from bagua.proto import common_pb2, node_pb2

ANSWER_S = 30.0  # an answer may need a search among many trials, on a busy machine
_MOST = 100
AWAY = "the coordinator is away"


class Questions:
    """Use from the event loop. ``wake``: there is something to send."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._numbers = itertools.count(1)
        self._to_send: deque[tuple[int, node_pb2.NodeFact]] = deque()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, request: common_pb2.TuneRequest) -> common_pb2.TuneReply:
        """The answer to a rank that tunes its job. Raises UnavailableError."""
        number = next(self._numbers)
        question = node_pb2.TuneQuestion(request_id=number, request=request)
        answer: node_pb2.TuneAnswer = await self._ask(number, node_pb2.NodeFact(tune=question))
        return answer.reply

    async def ask_code(self, job_id: str, piece: int) -> bytes:
        """A piece of the archive that the job needs. Raises UnavailableError; LaunchError if there is none."""
        number = next(self._numbers)
        question = node_pb2.CodeQuestion(request_id=number, job_id=job_id, piece=piece)
        answer: node_pb2.CodeAnswer = await self._ask(number, node_pb2.NodeFact(code=question))
        if answer.error:
            raise LaunchError(f"the code of the job can't be fetched: {answer.error} [BG904]")
        return answer.data

    async def ask_secrets(self, job_id: str) -> dict[str, str]:
        """Values of the job's secrets. Raises UnavailableError; LaunchError if the coordinator has them no more."""
        number = next(self._numbers)
        question = node_pb2.SecretsQuestion(request_id=number, job_id=job_id)
        answer: node_pb2.SecretsAnswer = await self._ask(number, node_pb2.NodeFact(secrets=question))
        if answer.error:
            raise LaunchError(f"the job can't have its secrets: {answer.error} [BG905]")
        return dict(answer.values)

    async def _ask(self, number: int, fact: node_pb2.NodeFact) -> Any:
        if len(self._waiting) >= _MOST:
            raise UnavailableError(f"{_MOST} questions wait for the coordinator [BG918]")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._to_send.append((number, fact))
        self._wake()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"the coordinator did not answer within {ANSWER_S:g} s [BG918]") from None
        finally:
            self._waiting.pop(number, None)

    def take(self) -> node_pb2.NodeFact | None:
        """The next one to send, if somebody still waits for it."""
        while self._to_send:
            number, fact = self._to_send.popleft()
            if number in self._waiting:
                return fact
        return None

    def answer(self, told: node_pb2.TuneAnswer | node_pb2.CodeAnswer | node_pb2.SecretsAnswer) -> None:
        """Takes an answer that came."""
        waiting = self._waiting.get(told.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(told)

    def drop(self) -> None:
        """The stream ended: no answer comes any more."""
        self._to_send.clear()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UnavailableError(f"{AWAY} [BG918]"))
