"""Sends spans to an OTLP receiver, if the environment names one (OTEL_EXPORTER_OTLP_ENDPOINT, as everywhere)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bagua.base.trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = (
    "traces were asked for ({name}), but OpenTelemetry is not installed, or does not fit the installed protobuf: "
    '`pip install "bagua[otel]"` ({error})'
)
FLUSH_MS = 3_000


@dataclass(frozen=True)
class Span:
    """A span that is over. Times in seconds since the epoch. ``parent``: its trace, and the id of the span above."""

    name: str
    parent: TraceContext
    start: float
    end: float
    span_id: int
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    error: str = ""


class _Told(logging.Handler):
    """Troubles of the exporter go into the log of the service, in its format."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


class Tracing:
    """Exports spans from a thread of its own: ``send`` never waits, and drops spans when a receiver is too slow."""

    def __init__(self, service: str, exporter: SpanExporter, instance: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        import bagua

        names = {"service.name": os.environ.get("OTEL_SERVICE_NAME", service), "service.version": bagua.__version__}
        if instance:
            names["service.instance.id"] = instance
        self._resource = Resource.create(names)
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=1_000)

    def send(self, span: Span) -> None:
        """Takes a span for the next batch."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(number: int) -> SpanContext:  # SAMPLED: processors drop spans without this mark
            return SpanContext(
                span.parent.trace_id, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
            )

        status = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
        made = ReadableSpan(  # a tracer would take times from now, and this span is over
            name=span.name,
            context=context(span.span_id),
            parent=context(span.parent.span_id) if span.parent.span_id else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            kind=SpanKind.INTERNAL,
            status=status,
            start_time=int(span.start * 1e9),
            end_time=int(max(span.start, span.end) * 1e9),  # the clock may have been set back
        )
        self._processor.on_end(made)

    def close(self) -> None:
        """Sends what is left, for three seconds at most."""
        self._processor.force_flush(FLUSH_MS)
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def asked_for() -> str:
    """The variable that asks for traces; empty: none does."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    return next((name for name in ENDPOINTS if os.environ.get(name)), "")


def open_tracing(
    service: str, instance: str = "", tell: Callable[[str], object] | None = None
) -> tuple[Tracing | None, str]:
    """Returns (the way to the receiver, or None where nobody asks; why there is none though somebody does). ``tell``
    hears of spans that could not be sent; it is called from other threads.
    """
    name = asked_for()
    if not name:
        return None, ""
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except Exception as error:  # also a protobuf that is too old for it: a service must not fail for its traces
        return None, MISSING.format(name=name, error=error)
    if tell is not None:
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(_Told(tell))
        logger.propagate = False  # the root logger would write them once more
    return Tracing(service, OTLPSpanExporter(), instance), ""
