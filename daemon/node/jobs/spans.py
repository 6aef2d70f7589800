"""Spans of a job's part on this node: its preparation, the start of its ranks, changes of generation, single steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from bagua.base import islands, trace_context
from bagua.daemon.node.rules import events
from bagua.daemon.node.rules.state import JobState, Phase, RankPhase
from bagua.otel.tracing import Span
from bagua.proto import common_pb2


class NodeSpans:
    """Spans of one job. They are made from each event and the state after it."""

    def __init__(self, job_id: str, node_id: str, environment: Mapping[str, str]) -> None:
        self._job_id = job_id
        self._node_id = node_id
        self._context = trace_context.of_job(job_id, environment)
        self._island_size = islands.size_in(environment)
        self._began = time.time()
        self._ready = 0.0
        self._leaving: tuple[int, float] | None = None  # the generation that is left, since when

    def follow(self, event: events.Event, state: JobState) -> list[Span]:
        """The spans that are over with this event."""
        now = time.time()
        match event:
            case events.EngineReady() if not self._ready:
                self._ready = now
                return [self._span("prepare", self._began, now, "launch", state.generation)]
            case events.PrepareFailed(text):
                return [self._span("prepare", self._began, now, "launch", state.generation, text)]
            case events.RankConnected() | events.RankStarted() if self._ready and self._all_there(state):
                began, self._ready = self._ready, float("inf")  # once: later starts are no part of the launch
                return [self._span("start ranks", began, now, "launch", state.generation)]
            case events.Suspended() | events.Regrouped() if self._leaving is None:
                self._leaving = (state.entered, now)
            case events.Entered(generation) if self._leaving is not None and generation > self._leaving[0]:
                since, self._leaving = self._leaving[1], None
                return [
                    self._span(f"enter generation {generation}", since, now, f"generation {generation}", generation)
                ]
        return []

    def step(self, rank: int, generation: int, step: common_pb2.SampledStep) -> Span:
        """Makes the span of one step of a rank."""
        name = f"step {step.step} of rank {rank}"
        span = self._span(name, step.began, step.began + step.seconds, "job", generation)
        shares = {"compute": step.compute, "exposed": step.exposed, "hidden": step.hidden}
        attributes = {f"bagua.step.{name}_seconds": seconds for name, seconds in shares.items()}
        known = {**span.attributes, "bagua.rank": rank, "bagua.step": step.step, **attributes}
        if self._island_size > 1:
            known["bagua.island"] = rank // self._island_size
        return replace(span, name="bagua.step", attributes=known)

    def _all_there(self, state: JobState) -> bool:
        if self._ready == float("inf") or state.phase is not Phase.RUNNING:
            return False
        return all(rank.connected or rank.phase is RankPhase.EXITED for rank in state.ranks)

    def _span(self, name: str, start: float, end: float, above: str, generation: int, error: str = "") -> Span:
        parent = trace_context.TraceContext(self._context.trace_id, trace_context.span_id(self._job_id, above))
        own = trace_context.span_id(self._job_id, f"{self._node_id}\0{name}")
        attributes: dict[str, str | int | float] = {
            "bagua.job": self._job_id,
            "bagua.node": self._node_id,
            "bagua.generation": generation,
        }
        title = "bagua.enter_generation" if name.startswith("enter") else f"bagua.{name.replace(' ', '_')}"
        return Span(title, parent, start, end, own, attributes, error)
