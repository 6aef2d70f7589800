"""Spans of a job's start and of its changes of membership, from what the reconciler has written."""

from __future__ import annotations

import time

from bagua.base import trace_context
from bagua.daemon.coordinator.rules.domain import Change, JobRecord, JobState
from bagua.otel.tracing import Span
from bagua.proto import common_pb2


class JobSpans:
    """Fed with each change after it was written. Keeps a few numbers of each living job."""

    def __init__(self) -> None:
        self._placed: dict[str, float] = {}
        self._changing: dict[str, tuple[int, float, str]] = {}  # job -> generation, since when, why

    def follow(self, change: Change) -> list[Span]:
        """The spans that are over with this change."""
        before, job = change.old.job, change.job
        found: list[Span] = []
        for event in change.events:
            if event.kind == "placed":
                self._placed[job.job_id] = event.time
                found.append(_span(job, "queue", job.created_at, event.time, "start"))
            if event.kind == "suspended":
                self._changing.setdefault(job.job_id, (0, event.time, event.reason))  # no generation yet
            if event.kind in ("regrouped", "state") and job.generation > max(1, before.generation):
                _, since, why = self._changing.get(job.job_id, (0, event.time, ""))
                self._changing[job.job_id] = (job.generation, since, why or event.reason)
        if before.state is JobState.STARTING and job.state is JobState.RUNNING:
            found.append(_span(job, "launch", self._placed.get(job.job_id, job.created_at), job.started_at, "start"))
            found.append(_span(job, "start", job.created_at, job.started_at))
        found += self._entered(change)
        if job.state.terminal and not before.state.terminal:
            self._placed.pop(job.job_id, None)
            self._changing.pop(job.job_id, None)
            error = job.reason if job.state is JobState.FAILED else ""
            found.append(_span(job, "job", job.created_at, job.finished_at, error=error))
        return found

    def _entered(self, change: Change) -> list[Span]:
        """Makes spans of a generation that has begun: all of its hosts are in it."""
        job = change.job
        generation, since, why = self._changing.get(job.job_id, (0, 0.0, ""))
        if generation != job.generation or not job.hosts or any(host.entered < generation for host in job.hosts):
            return []
        if any(host.suspended for host in job.hosts):
            return []
        del self._changing[job.job_id]
        now = max((event.time for event in change.events), default=0.0) or time.time()
        name = f"generation {generation}"
        return [_span(job, "membership change", since, now, span_name=name, reason=why)]


def _span(
    job: JobRecord,
    name: str,
    start: float,
    end: float,
    above: str = "job",
    *,
    span_name: str = "",
    reason: str = "",
    error: str = "",
) -> Span:
    """``above``: the span of the job that it belongs to. The job's own belongs to who submitted it."""
    context = trace_context.of_job(job.job_id, common_pb2.JobSpec.FromString(job.spec.wire).env)
    if name != "job":
        context = trace_context.TraceContext(context.trace_id, trace_context.span_id(job.job_id, above))
    attributes: dict[str, str | int | float] = {
        "bagua.job": job.job_id,
        "bagua.job.name": job.spec.name,
        "bagua.generation": job.generation,
        "bagua.nodes": len(job.hosts),
        "bagua.ranks": len(job.ranks),
    }
    if job.spec.island_size > 1:
        attributes["bagua.islands"] = len(job.ranks) // job.spec.island_size
    if reason:
        attributes["bagua.reason"] = reason
    title = "bagua.job" if name == "job" else f"bagua.{name.replace(' ', '_')}"
    return Span(title, context, start, end, trace_context.span_id(job.job_id, span_name or name), attributes, error)
