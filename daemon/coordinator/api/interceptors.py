"""Wraps every call: checks the credential and the role, then parses the body, then checks the job that it names, then
turns errors into status codes. Who may do what is in ``access.TABLE``.

A stranger (a caller without a token) is answered before a byte of the body is read. Only health is open to strangers: a
few calls at a time, each for a short time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from bagua.base.address import first_of_crowd
from bagua.base.errors import InvalidRequestError, ServiceError, UnauthenticatedError, UnavailableError
from bagua.base.rpc import code_of
from bagua.daemon.coordinator.rules.access import (
    OPEN,
    TABLE,
    Owned,
    Rule,
    Verdict,
    decide,
    needs_owner,
    refusal,
)
from bagua.daemon.coordinator.rules.identity import CURRENT, Authenticate, Identity
from bagua.daemon.coordinator.store.database_errors import failure_words
from bagua.daemon.coordinator.use.audit import OK, Audit
from bagua.daemon.coordinator.use.open_calls import Calls

STRANGERS_CALLS = 64  # Calls of strangers that are answered at the same time
_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {  # by (request is a stream, answer is a stream)
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_REFUSAL = (
    "The credential is missing or wrong: send the token of this coordinator (the file named 'token' in its state "
    "folder), or one of your own that is still good, with --token-file, BAGUA_TOKEN_FILE or BAGUA_TOKEN. [BG804]"
)

log = structlog.get_logger("coordinator.rpc")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Door(Protocol):
    """Keeps count of callers; ``peer`` is what gRPC calls the other end of a connection."""

    def admitted(self, peer: str) -> None:
        """Notes that a call on this connection has shown a valid token."""

    def refused(self, peer: str) -> None:
        """Notes that a call was refused because it has shown no valid token."""

    def network(self, peer: str) -> str:
        """Returns the network that the caller is counted with."""


@dataclass(eq=False)
class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets in whoever shows a credential, as far as that reaches. Calls of strangers end after ``patience_s``.
    ``owned`` tells where a job belongs."""

    authenticate: Authenticate
    owned: Callable[[str], Awaitable[Owned | None]]
    audit: Audit
    calls: Calls
    door: Door
    counters: Counter[tuple[str, str]]
    patience_s: float

    def __post_init__(self) -> None:
        self._strangers: dict[asyncio.Timeout, str] = {}  # their calls that are being answered -> network; oldest first

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            self.counters["bad_calls", "unknown_method"] += 1
            return handler
        self.counters["rpcs", method] += 1
        words = _REFUSAL
        try:
            caller = await self.authenticate(handler_call_details.invocation_metadata or ())
        except UnauthenticatedError as error:
            caller, words = None, str(error)
        if caller is not None:
            return self._for_bearers(handler, caller, method)
        if method.startswith(OPEN):
            return self._for_strangers(handler)
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._refuse, words))

    async def _abort(self, error: Exception, context: Any) -> None:
        """Ends the call with what ``error`` means to the caller. Raises AbortError."""
        if isinstance(error, ServiceError):
            if not isinstance(error, UnavailableError):  # which is not the caller's fault
                self.counters["bad_calls", type(error).__name__] += 1
            await context.abort(code_of(error), str(error))
        log.error("call_failed", exc_info=error, once_a_minute=type(error).__name__)
        self.counters["bad_calls", "internal"] += 1
        await context.abort(grpc.StatusCode.INTERNAL, f"{failure_words(error)} [BG825]")

    async def _refuse(self, words: str, _: Any, context: Any) -> None:
        """Answers without reading: so it is a handler of streams, whatever the method is."""
        self.door.refused(context.peer())
        self.counters["bad_calls", "unauthenticated"] += 1
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    def _for_bearers(self, handler: Handler, caller: Identity, method: str) -> Handler:
        """The same kind of handler. It checks and parses what comes, and answers what is raised."""
        behaviour = _behaviour(handler)
        parse = parser(handler.request_deserializer)
        rule = TABLE.get(method, _NOT_IN_TABLE)

        async def admit(request: Any, record: _Record) -> Any:
            self.door.admitted(record.peer)
            record.check(decide(caller, rule))  # before the body is parsed
            CURRENT.set(caller)
            if handler.request_streaming:
                return request
            parsed = parse(request)
            record.target = _target(parsed)
            job_id = getattr(parsed, "job_id", "")
            job = await self.owned(job_id) if job_id and needs_owner(caller, rule) else None
            record.check(decide(caller, rule, job_id, job), job_id)
            return parsed

        @asynccontextmanager
        async def recorded(context: Any) -> AsyncIterator[_Record]:
            record = _Record(self.audit, caller, method, rule, context.peer())
            try:
                with self.calls.running(caller):
                    yield record
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                record.failed(error)
                await self._abort(error, context)

        async def call(request: Any, context: Any) -> Any:
            async with recorded(context) as record:
                answer = await behaviour(await admit(request, record), context)
                record.done(answer)
                return answer

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with recorded(context) as record:
                admitted = await admit(request, record)
                record.done(None)  # it may last for days
                async for message in behaviour(admitted, context):
                    yield message

        made: Handler = _MAKERS[handler.request_streaming, handler.response_streaming](
            stream if inspect.isasyncgenfunction(behaviour) else call,
            request_deserializer=parse if handler.request_streaming else None,  # else above, where it may raise
            response_serializer=handler.response_serializer,
        )
        return made

    def _for_strangers(self, handler: Handler) -> Handler:
        """A handler of streams, so that it sees calls whose body never comes. ``handler`` takes one message."""
        behaviour = _behaviour(handler)
        parse = parser(handler.request_deserializer)

        async def call(_: Any, context: Any) -> None:
            if len(self._strangers) >= STRANGERS_CALLS:  # the oldest of the network that has most makes room
                crowded = [*self._strangers][first_of_crowd(self._strangers.values())]
                del self._strangers[crowded]
                crowded.reschedule(0)  # its call ends with a timeout
            limit = asyncio.timeout(self.patience_s)
            try:
                async with limit:
                    self._strangers[limit] = self.door.network(context.peer())
                    answer = await behaviour(parse(await context.read()), context)
                    if answer is not None:
                        await context.write(answer)
            except TimeoutError:
                words = (
                    f"A call without a token ends after {self.patience_s:g} s, or for others where many come. [BG804]"
                )
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, words)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await self._abort(error, context)
            finally:
                self._strangers.pop(limit, None)

        return grpc.stream_stream_rpc_method_handler(call, response_serializer=handler.response_serializer)


_NOT_IN_TABLE = Rule(frozenset())  # for a call that somebody has forgotten there: nobody may


class _Record:
    """Call as the audit log gets it."""

    def __init__(self, audit: Audit, caller: Identity, method: str, rule: Rule, peer: str) -> None:
        self._audit, self._caller, self._method, self._rule = audit, caller, method, rule
        self._refused = False
        self.peer = peer
        self.target = ""

    def check(self, verdict: Verdict, job_id: str = "") -> None:
        """Raises what the verdict means to the caller."""
        error = refusal(verdict, self._caller, self._method, job_id)
        if error is not None:
            self._refused = True
            raise error

    def done(self, answer: Any) -> None:
        """Notes that the call was let in and succeeded."""
        if self._rule.audited:
            self._add(OK, "", _target(answer) if answer is not None else "")

    def failed(self, error: Exception) -> None:
        """Written down where it may have changed something, or was refused."""
        if self._rule.audited or self._refused:
            code = code_of(error).name if isinstance(error, ServiceError) else grpc.StatusCode.INTERNAL.name
            self._add(code, str(error), "")

    def _add(self, outcome: str, detail: str, made: str) -> None:
        self._audit.add(self._caller, self._method, self.target or made, outcome, detail, self.peer)


_TARGETS = ("job_id", "node_id", "token", "prefix", "name", "id")  # Fields that say what a request is about


def _target(message: Any) -> str:
    for name in _TARGETS:
        found = getattr(message, name, "")
        if found and isinstance(found, str):
            return found
    made = getattr(message, "token", None)  # CreateToken
    return str(getattr(made, "id", "") or "")


def _behaviour(handler: Handler) -> Any:
    """The one of the four that is set."""
    return handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary


def parser(deserialize: Callable[[bytes], Any] | None) -> Callable[[Any], Any]:
    """Returns ``deserialize`` (None: as it came) with words where bytes are no message. Raises InvalidRequestError."""
    if deserialize is None:
        return lambda data: data

    def parse(data: Any) -> Any:
        try:
            return deserialize(data)
        except (DecodeError, TypeError) as error:  # TypeError: the stream ended before a message came
            raise InvalidRequestError(
                "The request can't be read: its bytes are no message of this method. Client and coordinator must "
                "speak the same protocol. [BG820]"
            ) from error

    return parse
