"""Gives a submitted job its place in a distributed trace, and tells a receiver of the submission."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

from bagua.base import trace_context
from bagua.otel.tracing import Span, asked_for, open_tracing
from bagua.proto import job_pb2


def traced(request: job_pb2.SubmitJobRequest, call: Callable[[], job_pb2.Job]) -> job_pb2.Job:
    """``call``, which submits ``request``. Nothing else happens where the environment asks for no traces and names no
    parent (TRACEPARENT), or where the job brings a parent of its own."""
    asked = bool(asked_for())
    if trace_context.VARIABLE in request.spec.env or not (asked or os.environ.get(trace_context.VARIABLE)):
        return call()
    parent = trace_context.from_environment(os.environ)
    # | 1: 0 is no id.
    own = trace_context.TraceContext(parent.trace_id, secrets.randbits(64) | 1) if asked else parent
    if own.span_id:
        request.spec.env[trace_context.VARIABLE] = own.traceparent
    began = time.time()
    job = call()
    tracing, _ = open_tracing("bagua")
    if tracing is not None:
        tracing.send(Span("bagua.submit", parent, began, time.time(), own.span_id, {"bagua.job": job.job_id}))
        tracing.close()
    return job
