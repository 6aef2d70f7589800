"""A picture of one step of a trace: ranks and hosts below each other, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.bench.plots import new_figure, save_figure
from bagua.timeline.chrome import step_of

COLOURS = {
    "forward": "#4e79a7",
    "backward": "#76b7b2",
    "wait": "#e15759",
    "optimizer": "#59a14f",
    "reduced": "#f28e2b",
    "submitted": "#edc948",
    "reduce": "#b07aa1",
    "encode": "#9c755f",
    "decode": "#9c755f",
    "copy": "#d4a6c8",
    "send": "#bab0ac",
    "receive": "#79706e",
}
"""By phase; others are not drawn."""
_HEIGHT = 0.8

Event = dict[str, Any]
Lane = tuple[str, list[Event]]


def plot_step(document: dict[str, Any], path: Path, number: int | None = None) -> None:
    """Draws that step, or the one in the middle. Raises ValueError if there is none, ConfigError for the file."""
    steps = sorted({event["args"]["step"] for event in document["traceEvents"] if event.get("cat") == "step"})
    if not steps:
        raise ValueError("No step was recorded: there is nothing to draw.")
    found = lanes(step_of(document, steps[len(steps) // 2] if number is None else number))
    figure, (axes,) = new_figure(1)
    figure.set_size_inches(11, 1.2 + 0.28 * len(found))
    zero = min(event["ts"] for _, events in found for event in events)
    for row, (_, events) in enumerate(found):
        for event in events:
            bar = [((event["ts"] - zero) / 1e3, max(event["dur"] / 1e3, 0.001))]
            axes.broken_barh(bar, (row - _HEIGHT / 2, _HEIGHT), color=COLOURS[event["cat"]], linewidth=0)
    axes.set_yticks(range(len(found)), [name for name, _ in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"One step of {document['otherData']['job_id']}", fontsize=10)
    _legend(axes, found)
    save_figure(figure, path)


def _legend(axes: Any, found: Sequence[Lane]) -> None:
    from matplotlib.patches import Patch

    drawn = {event["cat"] for _, events in found for event in events}
    patches = [Patch(color=colour, label=phase) for phase, colour in COLOURS.items() if phase in drawn]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def lanes(document: dict[str, Any]) -> list[Lane]:
    """Rows of the picture, in the order of the document: threads with something to draw."""
    processes = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    found = []
    for (pid, tid), name in threads.items():
        events = [
            event
            for event in document["traceEvents"]
            if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, tid) and event["cat"] in COLOURS
        ]
        if events:
            found.append((f"{processes[pid]}: {name}", events))
    return found
