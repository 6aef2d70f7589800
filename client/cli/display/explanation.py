"""Tells the history of a job in words, on one page: a pure function of its events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bagua.base.text import printable
from bagua.client.describe import duration

if TYPE_CHECKING:
    from bagua.proto.job_pb2 import JobEvent

ENDS = ("SUCCEEDED", "FAILED", "CANCELLED")
# Events of which a job has one for each node: several in a row become one line, as long as nothing went wrong.
_ROUTINE = {
    "engine_ready": "engine",
    "rank_started": "start",
    "rank_exited": "end",
    "node_stopped": "stopped",
}
_AFTER = 14  # Width of the longest time since the beginning: +23 h 59 min
_CANCELLED = "cancelled: "
_STOPPING_SIGNALS = ("SIGTERM", "SIGKILL")  # the service's own, when it ends a job


@dataclass(frozen=True)
class _Line:
    """``mark``: loss, change, wait, end or empty."""

    time: float
    mark: str
    text: str
    generation: int
    routine: bool = False


def marks_of(events: Iterable[JobEvent]) -> list[str]:
    """The part of the story that each event belongs to: ``loss``, ``change``, ``wait``, ``end``, or empty: routine. It
    is no loss that the service stops ranks when the job is ending, and that their nodes notice it."""
    found, ending = [], False
    for event in events:
        mark = _mark(event)
        ending = mark == "end" or (ending and event.kind != "regrouped")
        found.append("" if ending and mark == "loss" and _follows(event) else mark)
    return found


def _follows(event: JobEvent) -> bool:
    return event.kind == "node_error" or any(name in event.reason for name in _STOPPING_SIGNALS)


def _mark(event: JobEvent) -> str:
    state = event.reason.partition(":")[0]
    match event.kind:
        case "state" if state in ENDS:
            return "end"
        case "state":
            return "wait" if state == "WAITING" else "end" if state == "STOPPING" else ""
        case "rank_exited":
            return "" if event.reason.endswith(" exited with code 0") else "loss"
        case "suspended" | "node_error" | "newcomers_lost":
            return "loss"
        case "regrouped" | "newcomers" | "asked" | "stopped" | "placed":
            return "change"
        case "waiting":
            return "wait"
        case "cancel_requested":
            return "end"
    return ""


def explain(job_id: str, events: Iterable[JobEvent], now: float = -math.inf) -> str:
    """The whole page, in lines that end with a newline. ``events``: in order. Times are UTC. ``now``: seconds since the
    epoch, for a job that has not ended."""
    history = list(events)
    lines = [f"Job {_clean(job_id)} {_verdict(history)}", ""]
    if not history:
        return lines[0] + "\n"
    lines += [f"  {line}" for line in _spent(history, now)]
    told = [_line(event, mark) for event, mark in zip(history, marks_of(history), strict=True)]
    for mark, title in (("loss", "Lost"), ("wait", "Waited"), ("change", "Changed")):
        count = sum(line.mark == mark for line in told)
        lines.append(f"  {title + ':':<10}{'nothing' if not count else f'{count} x, marked {mark!r} below'}")
    lines += ["", f"  {'UTC':<20}{'after':>{_AFTER}}  {'':<7} what happened, and why"]
    generation = 0
    for line in _folded(told):
        if line.generation != generation and line.generation:
            lines.append(f"  {'':<20}{'':>{_AFTER}}  {'':<7} -- generation {line.generation} --")
            generation = line.generation
        after = _after(history[0].time, line.time)
        lines.append(f"  {_clock(line.time):<20}{after:>{_AFTER}}  {line.mark:<7} {line.text}")
    return "\n".join(lines) + "\n"


def _verdict(history: Sequence[JobEvent]) -> str:
    """The end and its reason, or the present state, in one sentence or two."""
    if not history:
        return "has no events."
    end = next((event for event in reversed(history) if event.kind == "state" and _state(event) in ENDS), None)
    if end is not None:
        lasted = _after(history[0].time, end.time).removeprefix("+")
        return f"{_state(end).lower()} after {lasted}: {_reason(end)}"
    last = next((event for event in reversed(history) if _mark(event) or event.kind == "state"), history[-1])
    if last.kind == "state":
        return f"has not ended. It is {_clean(_state(last)).lower()}: {_reason(last)}"
    if last.kind == "waiting":
        return f"has not ended. It waits: {_clean(last.reason)}"
    return f"has not ended. The last change: {_clean(last.reason) or _clean(last.kind)}"


def _spent(history: Sequence[JobEvent], now: float) -> Iterator[str]:
    """Tells how the job's time divides until its end, or ``now``."""
    spent: dict[str, float] = {}
    phase, since = "for nodes", history[0].time
    for event in history:
        following = _phase_after(event)
        if following is not None:
            spent[phase] = spent.get(phase, 0.0) + max(0.0, event.time - since)
            phase, since = following, event.time
    spent[phase] = spent.get(phase, 0.0) + max(0.0, now - since)
    shown = [f"{name} {duration(seconds)}" for name, seconds in spent.items() if name and math.isfinite(seconds)]
    if shown:
        yield f"{'Time:':<10}{', '.join(shown)}"


def _phase_after(event: JobEvent) -> str | None:
    """The phase of a job after an event; None: the same as before."""
    if event.kind == "placed":
        return "starting"
    if event.kind == "regrouped":
        return "running"
    if event.kind != "state":
        return None
    state = _state(event)
    return {"RUNNING": "running", "WAITING": "waiting", "STOPPING": "stopping"}.get(
        state, "" if state in ENDS else None
    )


def _line(event: JobEvent, mark: str) -> _Line:
    reason = _clean(event.reason)
    kind = _clean(event.kind)
    words = {
        "submitted": f"submitted: {reason}",
        "placed": reason,
        "asked": f"somebody asked: {reason}",
        "suspended": f"the step is held: {reason}",
        "waiting": f"waits: {reason}",
        "cancel_requested": f"somebody asked for the end: {reason.removeprefix(_CANCELLED)}",
        "node_error": f"seen by {reason}",  # it begins with the node's name
        "regrouped": f"goes on as {reason}",  # generation 2: why
    }
    text = words.get(event.kind, reason if event.kind in _ROUTINE or event.kind == "state" else f"{kind}: {reason}")
    return _Line(event.time, mark, text, event.generation, event.kind in _ROUTINE and not mark)


def _folded(lines: Sequence[_Line]) -> Iterator[_Line]:
    """Leaves out the middle of long rows of routine."""
    row: list[_Line] = []
    for line in lines:
        if line.routine and (not row or row[0].generation == line.generation):
            row.append(line)
            continue
        yield from _row(row)
        row = [line] if line.routine else []
        if not line.routine:
            yield line
    yield from _row(row)


def _row(row: Sequence[_Line]) -> Iterator[_Line]:
    if len(row) <= 4:
        yield from row
        return
    yield row[0]
    yield _Line(
        row[-2].time, "", f"... and {len(row) - 2} more of this kind (`bagua job show` has all)", row[0].generation
    )
    yield row[-1]


def _state(event: JobEvent) -> str:
    return event.reason.partition(":")[0]


def _reason(event: JobEvent) -> str:
    """Returns the event's reason without the state."""
    return _clean(event.reason.partition(":")[2]).removeprefix(_CANCELLED) or "no reason was recorded"


def _clean(text: str) -> str:
    """Puts a text on one line, without control characters."""
    return " ".join(printable(text).split())


def _after(first: float, now: float) -> str:
    seconds = now - first
    return f"+{duration(max(0.0, seconds))}" if math.isfinite(seconds) else "?"


def _clock(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "?"
