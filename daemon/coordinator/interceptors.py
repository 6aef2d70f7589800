"""What surrounds every call: the credential, errors to status codes, counts."""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import structlog

from bagua.base.errors import ServiceError, UnauthenticatedError, UnavailableError
from bagua.base.rpc import code_of
from bagua.base.scope import Scope, read_scope
from bagua.base.security import METADATA_KEY
from bagua.daemon.coordinator import scopes
from bagua.daemon.coordinator.counters import Counters

_OPEN = "/grpc.health.v1.Health/"  # everybody may ask for health
_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {  # by (request is a stream, answer is a stream)
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

log = structlog.get_logger("coordinator.rpc")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets in whoever shows the token, or one for a job as far as that reaches; turns exceptions into status codes with
    words."""

    def __init__(self, token: str, counters: Counters) -> None:
        self._token = token
        self._expected = f"Bearer {token}".encode()
        self._counters = counters

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of a call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            self._counters.add("bad_calls", "unknown_method")
            return handler
        self._counters.add("rpcs", method)
        if method.startswith(_OPEN):
            return _wrapped(handler, self._guard, _allow)
        shown = _shown(handler_call_details)
        if hmac.compare_digest(shown, self._expected):
            return _wrapped(handler, self._guard, _allow)
        scope = read_scope(self._token, shown.decode(errors="replace").removeprefix("Bearer "))
        if scope is not None:
            return _wrapped(handler, self._guard, lambda: _enter(scope, method))
        self._counters.add("bad_calls", "unauthenticated")
        log.warning("refused", method=method, reason="credential missing or wrong")
        return _wrapped(handler, self._guard, _refuse)

    async def _guard(self, error: BaseException, context: Any) -> None:
        """Answers ``error``."""
        if isinstance(error, ServiceError):
            if not isinstance(error, UnavailableError):  # which is not the caller's fault
                self._counters.add("bad_calls", type(error).__name__)
            await context.abort(code_of(error), str(error))
        log.error("call_failed", exc_info=error)
        self._counters.add("bad_calls", "internal")
        await context.abort(
            grpc.StatusCode.INTERNAL, f"The coordinator failed: {type(error).__name__}. Its log tells more."
        )


_REFUSAL = (
    "The credential is missing or wrong: send the token of this coordinator (the file named 'token' in its state "
    "folder) with --token-file, BAGUA_TOKEN_FILE or BAGUA_TOKEN."
)


def _shown(details: grpc.HandlerCallDetails) -> bytes:
    """The credential that a call shows; empty without exactly one."""
    shown = [value for key, value in details.invocation_metadata or () if key == METADATA_KEY]
    if len(shown) != 1:
        return b""
    return shown[0].encode() if isinstance(shown[0], str) else shown[0]


def _allow() -> None:
    """For holders of the coordinator's token."""


def _refuse() -> None:
    raise UnauthenticatedError(_REFUSAL)


def _enter(scope: Scope, method: str) -> None:
    scopes.check_method(scope, method)
    scopes.CURRENT.set(scope)


def _wrapped(
    handler: Handler, guard: Callable[[BaseException, Any], Awaitable[None]], enter: Callable[[], None]
) -> Handler:
    """The same kind of handler, with ``guard`` around it. ``enter`` is called before it, in the call's own context."""
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    # Exactly one is set.
    behaviour: Any = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary

    async def call(request: Any, context: Any) -> Any:
        try:
            enter()
            scopes.check_request(request)
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await guard(error, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            enter()
            scopes.check_request(request)
            async for message in behaviour(request, context):
                yield message
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await guard(error, context)

    made: Handler = make(
        stream if inspect.isasyncgenfunction(behaviour) else call,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made
