"""Texts with colours for ``bagua top``: rows of its tables, a job's head, its values, and its map of ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from rich.text import Text

from bagua.base.text import printable
from bagua.client.describe import duration, island_size, job_state
from bagua.proto import job_pb2

MAX_ROWS = 40  # ranks of a map
COLUMNS = 60
_COLOURS = {"running": "blue", "succeeded": "green", "failed": "red", "cancelled": "yellow", "pending": "grey62"}
_PARTS = (
    ("compute", "blue", "computation"),
    ("hidden", "green", "hidden"),
    ("ranks", "yellow", "waits for ranks"),
    ("exposed", "red", "exposed"),
)
_HEAT = ("grey30", "royal_blue1", "dark_orange", "red1")

Row = tuple[Text, ...]


def _text(words: object, style: str = "", most: int = 60) -> Text:
    shown = printable(str(words))
    return Text(shown if len(shown) <= most else shown[: most - 1] + "…", style)


def job_row(job: job_pb2.Job) -> Row:
    """A job in the table: id, name, state, progress, ranks, since when, reason."""
    state = job_state(job.state)
    progress = job.progress if job.HasField("progress") else None
    steps = "" if progress is None else f"{progress.step}/{progress.total}" if progress.total else str(progress.step)
    seconds = (job.finished_at or time.time()) - job.created_at
    return (
        _text(job.job_id, "dim"),
        _text(job.spec.name, "bold", 32),
        _text(state, _COLOURS.get(state, "yellow")),
        _text(steps),
        _text(job.spec.nnodes * job.spec.nproc_per_node),
        _text(duration(max(0.0, seconds))),
        _text("" if state in ("running", "succeeded") else job.reason),
    )


def node_row(node: job_pb2.Node) -> Row:
    """A node in the table: id, slots, used ones, state, address, version."""
    state = "away" if not node.connected else "draining" if node.draining else "connected"
    style = {"away": "red", "draining": "yellow"}.get(state, "green")
    texts = (node.slots, node.used_slots)
    return (
        _text(node.node_id),
        *(_text(one) for one in texts),
        _text(state, style),
        _text(node.address),
        _text(node.version, "dim"),
    )


def job_head(job: job_pb2.Job, away: str) -> Text:
    """State and size of a job, and why it is so. ``away``: why the coordinator does not answer; empty: it does."""
    state = job_state(job.state)
    text = Text(f"{job.job_id}  ", "dim") + Text(state, f"bold {_COLOURS.get(state, 'yellow')}")
    of = f" in islands of {size}" if (size := island_size(job)) > 1 else ""
    text += Text(f"  {job.spec.nnodes} × {job.spec.nproc_per_node} ranks{of}  generation {job.generation}")
    for words, style in ((job.reason, ""), (job.waiting, "yellow"), (away, "red")):
        if words:
            text += Text("\n" + printable(words), style)
    return text


def newest_values(now: dict[str, object]) -> Text:
    """Step, speed and reported values, of ``History.now_document``."""
    if now["step"] is None:
        return Text("no figures yet", "dim")
    text = Text.assemble((f"step {now['step']}" + (f" of {now['total']}" if now["total"] else ""), "bold"))
    if now["speed"]:
        text += Text(f"   {now['speed']:.4g} steps/s")
    metrics = now["metrics"]
    assert isinstance(metrics, dict)
    for name, value in metrics.items():
        text += Text(f"   {printable(name)} ", "dim") + Text("nan" if value is None else f"{value:.4g}")
    return text + Text("\nsteps per second since the job was first seen", "dim")


def step_parts(values: dict[str, float]) -> Text:
    """A bar: how a step divides."""
    found = [(values[name], colour, words) for name, colour, words in _PARTS if values.get(name)]
    total = sum(value for value, _, _ in found)
    if not total:
        return Text("")
    text = Text("")
    for value, colour, _ in found:
        text += Text("█" * max(1, round(COLUMNS * value / total)), colour)
    text += Text(f"  {total:.4g} ms a step\n")
    for value, colour, words in found:
        text += Text("■ ", colour) + Text(f"{words} {value:.3g} ms   ")
    return text


def rank_map(rows: Sequence[Sequence[float | None]], ranks_in_row: int) -> Text:
    """A line for each rank: dark as the median of its column, red where it computes twice as long."""
    text = Text("")
    if len(rows) < 2:
        return text
    shown = [row[-COLUMNS:] for row in rows]
    columns = [[value for value in column if value is not None] for column in zip(*shown, strict=True)]
    medians = [statistics.median_low(column or [0.0]) for column in columns]
    for number, row in enumerate(shown[:MAX_ROWS]):
        text += Text(f"{number * ranks_in_row:>5} ", "dim")
        for value, median in zip(row, medians, strict=True):
            text += _cell(value, median)
        text += Text("\n")
    hidden = len(rows) - MAX_ROWS
    return text + Text(f"      … and {hidden} more lines\n", "dim") if hidden > 0 else text


def _cell(value: float | None, median: float) -> Text:
    if value is None:
        return Text(" ")
    ratio = value / (median or value or 1.0)
    return Text("█", _HEAT[(ratio > 1.15) + (ratio > 1.4) + (ratio > 1.8)])
