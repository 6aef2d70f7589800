"""gRPC as every part of the service uses it: one table of errors for servers and clients, options of channels."""

from __future__ import annotations

import grpc

from bagua.base.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    TooMuchError,
    UnauthenticatedError,
    UnavailableError,
)

# Servers answer with the code, clients raise the class again. The first class of a code is the one that is raised.
CODES: tuple[tuple[type[ServiceError], grpc.StatusCode], ...] = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (ConflictError, grpc.StatusCode.ALREADY_EXISTS),
    (TooMuchError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (UnavailableError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ServiceError, grpc.StatusCode.INTERNAL),
)

MAX_REQUEST_BYTES = 4 << 20  # what a server accepts in one message
MAX_SPEC_BYTES = 1 << 20  # the specification of a job: arguments, environment and all
MAX_REPLY_BYTES = 64 << 20  # what a client accepts: a job of 100,000 ranks

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once, whatever an older one has met
)

# For streams of small messages. gRPC's probe of the bandwidth sends a ping for most messages, which makes a heartbeat
# cost a third more. Without the probe the window stays as it is here: 256 KiB for each round trip of a stream.
STEADY_WINDOW: tuple[tuple[str, int], ...] = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 << 10),
)


def too_large_spec(size: int) -> str:
    """Says so, before it is sent and where it comes in."""
    return (
        f"spec has {size} bytes; {MAX_SPEC_BYTES} is the limit of a job's specification. Pass large inputs in files "
        "that the nodes can read."
    )


def code_of(error: ServiceError) -> grpc.StatusCode:
    """The status code that a server answers for ``error``."""
    return next(code for kind, code in CODES if isinstance(error, kind))


def error_of(code: grpc.StatusCode, message: str) -> ServiceError:
    """The exception that a client raises for an answer of ``code``."""
    kind = next((kind for kind, known in CODES if known is code), ServiceError)
    return kind(message)
