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

PATIENCE_S = 120.0  # how long a coordinator that is away is waited for, where a job can not begin without the answer
_PAUSE_S = 0.5
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
        answer: node_pb2.TuneAnswer = await self._ask(tune=node_pb2.TuneQuestion(request=request))
        return answer.reply

    async def ask_code(self, job_id: str, piece: int) -> bytes:
        """A piece of the archive that the job needs. Waits for a coordinator that is away. Raises LaunchError."""
        question = node_pb2.CodeQuestion(job_id=job_id, piece=piece)
        answer: node_pb2.CodeAnswer = await self._ask_patiently("code", "BG904", code=question)
        return answer.data

    async def ask_secrets(self, job_id: str) -> dict[str, str]:
        """Values of the job's secrets. Waits for a coordinator that is away. Raises LaunchError."""
        question = node_pb2.SecretsQuestion(job_id=job_id)
        answer: node_pb2.SecretsAnswer = await self._ask_patiently("secrets", "BG905", secrets=question)
        return dict(answer.values)

    async def _ask_patiently(self, what: str, code: str, /, **question: Any) -> Any:
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                answer = await self._ask(**question)
                break
            except UnavailableError as error:
                if asyncio.get_running_loop().time() >= end:
                    raise LaunchError(f"the {what} of the job can't be fetched: {error} [{code}]") from error
            await asyncio.sleep(_PAUSE_S)
        if answer.error:
            raise LaunchError(f"the {what} of the job can't be fetched: {answer.error} [{code}]")
        return answer

    async def _ask(self, **question: Any) -> Any:
        """Asks one question, named as the field of NodeFact that holds it. Raises UnavailableError."""
        if len(self._waiting) >= _MOST:
            raise UnavailableError(f"{_MOST} questions wait for the coordinator [BG918]")
        number = next(self._numbers)
        next(iter(question.values())).request_id = number
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._to_send.append((number, node_pb2.NodeFact(**question)))
        self._wake()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"the coordinator did not answer within {ANSWER_S:g} s [BG918]") from None
        finally:
            self._waiting.pop(number, None)

    def next_fact(self) -> node_pb2.NodeFact | None:
        """Returns the next question to send for which somebody still waits."""
        while self._to_send:
            number, fact = self._to_send.popleft()
            if number in self._waiting:
                return fact
        return None

    def answer(self, told: node_pb2.TuneAnswer | node_pb2.CodeAnswer | node_pb2.SecretsAnswer) -> None:
        """Hands an answer to whoever waits for it."""
        waiting = self._waiting.get(told.request_id)
        if waiting is not None and not waiting.done():
            # Its time may be over: then nobody waits for the answer.
            waiting.set_result(told)

    def fail_all(self) -> None:
        """Fails all questions: the stream has ended, and no answer comes any more."""
        self._to_send.clear()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UnavailableError(f"{AWAY} [BG918]"))
