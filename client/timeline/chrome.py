"""A trace as Chrome trace events, for https://ui.perfetto.dev, and for everything of ours that shows a step.

The form, a JSON object::

    {"displayTimeUnit": "ms",
     "otherData": {"job_id": "job-1", "steps": 5, "form": 1,
                   "missing": ["rank 3 recorded 0 of 5 steps ..."],
                   "clock_bound_us": {"node-a": 0.0, "node-b": 41.5}},
     "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "rank 0 (node-a)"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 1, "args": {"name": "training"}},
        {"ph": "X", "name": "forward", "cat": "forward", "pid": 2, "tid": 1, "ts": 12.5, "dur": 830.1,
         "args": {"step": 731}}, ...]}

``ts`` and ``dur`` are in µs from the earliest event, on the coordinator's clock. ``clock_bound_us`` says by how much
the times of a node may be wrong. Each rank is a process, and each host (its engine) is one. ``args`` of a process_name
has ``rank`` (-1: a host) and ``node``, too. On one thread, events nest or follow each other. ``step`` counts forward
passes in training, the same on all ranks; ``operation`` counts those of a communicator, the same on all hosts.

Threads of a rank: ``training`` (step, forward, backward, submit, wait, optimizer and so on), ``other threads``, and one
for each bucket. Threads of a host: ``operations``, ``reduction`` (reduce, copy, encode, decode), ``to NODE``, ``from
NODE``. ``cat`` is the phase.

Phases of a bucket: "bucket", from its last gradient to its result, and inside it "ready" (until it is submitted),
"submitted" (until all ranks of the host have submitted it) and "reduced" (until the result is there). Phases of an
operation of a host: "operation", and inside it "ranks", "queued" and "host".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bagua.timeline.trace import ENGINE, Clock, Source, Span, Trace, in_order, source_name

FORM = 1
TRAINING, OTHERS, BUCKETS = 1, 2, 10
OPERATIONS, REDUCTION, WIRE = 1, 100, 200  # Numbers of the first thread of each kind
_OF_BUCKET = ("bucket", "ready", "submitted", "reduced")
_OF_OPERATION = ("operation", "ranks", "queued", "host")
_WIRE = ("send", "receive")
_WORDS = {"ready": "waits for its turn", "submitted": "submitted", "reduced": "reduced"}

Event = dict[str, Any]
Track = tuple[int, str, Sequence[Span]]  # Number, name and spans of one thread


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Makes the document of Chrome's trace events."""
    sources = [_on_one_clock(source, trace.clocks.get(source.node, Clock())) for source in in_order(trace.sources)]
    zero = min((span.begin for source in sources for span in source.spans), default=0)
    ranks = {source.rank: source.node for source in sources if source.rank != ENGINE}
    events: list[Event] = []
    for pid, source in enumerate(sources, 1):
        name = source_name(source, trace.island_size) + ("" if source.rank == ENGINE else f" ({source.node})")
        events += [
            _meta("process_name", pid, 0, name=name, rank=source.rank, node=source.node),
            _meta("process_sort_index", pid, 0, sort_index=pid),
        ]
        for tid, title, spans in _tracks(source):
            events += [_meta("thread_name", pid, tid, name=title), _meta("thread_sort_index", pid, tid, sort_index=tid)]
            # Where two begin together, the outer one comes first.
            for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
                events.append(_event(span, source, ranks, pid, tid, zero))
    other = {
        "job_id": trace.job_id,
        "steps": trace.steps,
        "form": FORM,
        "missing": trace.missing(),
        "clock_bound_us": {node: bound / 1e3 for node, bound in trace.bounds().items()},
    }
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def step_of(document: dict[str, Any], number: int) -> dict[str, Any]:
    """The same document with the events of one step alone: those that overlap it on some rank. Raises ValueError if no
    rank has recorded it."""
    spans = [
        event for event in document["traceEvents"] if event.get("cat") == "step" and event["args"]["step"] == number
    ]
    if not spans:
        raise ValueError(f"There is no step {number} in this trace.")
    begin = min(event["ts"] for event in spans)
    end = max(event["ts"] + event["dur"] for event in spans)
    kept = [
        event
        for event in document["traceEvents"]
        if event["ph"] == "M" or (event["ts"] < end and event["ts"] + event["dur"] > begin)
    ]
    return {**document, "traceEvents": kept}


def lanes(document: dict[str, Any]) -> list[tuple[str, str, list[Event]]]:
    """(process, thread, its spans) of the document, for each thread that has spans."""
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name", "") for e in document["traceEvents"]}
    found: dict[tuple[int, int], list[Event]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return [
        (names.get(("process_name", pid, 0), ""), names.get(("thread_name", pid, tid), ""), spans)
        for (pid, tid), spans in sorted(found.items())
    ]


def step_in_the_middle(document: dict[str, Any]) -> int | None:
    """Number of the step to look at; None: no step was recorded."""
    steps = sorted({event["args"]["step"] for event in document["traceEvents"] if event.get("cat") == "step"})
    return steps[len(steps) // 2] if steps else None


def _meta(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _on_one_clock(source: Source, clock: Clock) -> Source:
    spans = [replace(span, begin=span.begin + clock.offset, end=span.end + clock.offset) for span in source.spans]
    return replace(source, spans=spans)


def _event(span: Span, source: Source, ranks: dict[int, str], pid: int, tid: int, zero: int) -> Event:
    args: dict[str, Any] = {"operation": span.number} if source.rank == ENGINE else {"step": span.number}
    if span.bytes:
        args["bytes"] = span.bytes
    if span.comm and source.rank == ENGINE:
        args["communicator"] = span.comm
    return {
        "ph": "X",
        "name": _title(span, source, ranks),
        "cat": span.phase,
        "pid": pid,
        "tid": tid,
        "ts": (span.begin - zero) / 1e3,
        "dur": max(0, span.end - span.begin) / 1e3,
        "args": args,
    }


def _title(span: Span, source: Source, ranks: dict[int, str]) -> str:
    if source.rank != ENGINE:
        if span.phase in ("step", "bucket"):
            return span.name
        if span.phase in _OF_BUCKET:
            return _WORDS[span.phase]
        return f"{span.phase} {span.name}".strip()
    if span.phase == "operation":
        return span.name
    if span.phase == "ranks":
        return f"waits for rank {span.peer}"
    if span.phase == "host":
        return f"waits for host {_host(source, span.peer)}"
    return "waits for its turn" if span.phase == "queued" else f"{span.phase} {span.name}"


def _host(source: Source, index: int) -> str:
    return source.hosts[index] if 0 <= index < len(source.hosts) else str(index)


# ---- threads


def _tracks(source: Source) -> Iterator[Track]:
    if source.rank == ENGINE:
        yield from _engine_tracks(source)
        return
    of_buckets = [span for span in source.spans if span.phase in _OF_BUCKET]
    rest = [span for span in source.spans if span.phase not in _OF_BUCKET]
    yield TRAINING, "training", [span for span in rest if not span.comm]
    if others := [span for span in rest if span.comm]:
        yield from _in_lanes(OTHERS, "other threads", [[span] for span in others])  # spans of several threads overlap
    names = sorted({span.name for span in of_buckets}, key=_natural)
    for tid, name in enumerate(names, BUCKETS):
        yield tid, name, [span for span in of_buckets if span.name == name]


def _engine_tracks(source: Source) -> Iterator[Track]:
    groups: dict[tuple[int, int], list[Span]] = {}
    for span in source.spans:
        if span.phase in _OF_OPERATION:
            groups.setdefault((span.comm, span.number), []).append(span)
    yield from _in_lanes(OPERATIONS, "operations", groups.values())
    computing = [[span] for span in source.spans if span.phase not in (*_OF_OPERATION, *_WIRE)]
    yield from _in_lanes(REDUCTION, "reduction", computing)
    ways = sorted({(span.peer, span.phase) for span in source.spans if span.phase in _WIRE})
    for tid, (peer, phase) in enumerate(ways, WIRE):
        title = f"{'to' if phase == 'send' else 'from'} {_host(source, peer)}"
        yield tid, title, one_after_the_other(s for s in source.spans if s.phase == phase and s.peer == peer)


def one_after_the_other(spans: Iterable[Span]) -> list[Span]:
    """Messages of one direction, which are handed over together and cross one after the other: each begins when the one
    before it has ended."""
    found: list[Span] = []
    reached = -(1 << 63)
    for span in sorted(spans, key=lambda one: (one.end, one.begin)):
        found.append(replace(span, begin=min(max(span.begin, reached), span.end)))
        reached = max(reached, span.end)
    return found


def _in_lanes(first: int, title: str, groups: Iterable[Sequence[Span]]) -> Iterator[Track]:
    lanes: list[list[Span]] = []
    ends: list[int] = []
    for group in sorted(groups, key=lambda one: min(span.begin for span in one)):
        begin, end = min(span.begin for span in group), max(span.end for span in group)
        lane = next((number for number, reached in enumerate(ends) if reached <= begin), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            ends.append(end)
        lanes[lane] += group
        ends[lane] = end
    for number, spans in enumerate(lanes):
        yield first + number, title if number == 0 else f"{title} ({number + 1})", spans


def _natural(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d+", name)], name  # "bucket 10" comes after "bucket 9"
