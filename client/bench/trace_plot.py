"""A picture of one step of a trace: ranks and hosts below each other, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.bench.plots import new_figure, save_figure
from bagua.timeline.chrome import lanes, step_in_the_middle, step_of

# By phase; others are not drawn.
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
_HEIGHT = 0.8

Event = dict[str, Any]
Lane = tuple[str, list[Event]]


def plot_step(document: dict[str, Any], path: Path) -> None:
    """Draws the step in the middle. Raises ValueError if there is none, ConfigError for the file."""
    number = step_in_the_middle(document)
    if number is None:
        raise ValueError("No step was recorded: there is nothing to draw.")
    found = []
    for process, thread, spans in lanes(step_of(document, number)):
        if events := [event for event in spans if event["cat"] in COLOURS]:
            found.append((f"{process}: {thread}", events))
    figure, (axes,) = new_figure(1)
    figure.set_size_inches(11, 1.2 + 0.2 * len(found))
    begin, end = _extent(document, number)
    for row, (_, events) in enumerate(found):
        for event in events:
            bar = [((event["ts"] - begin) / 1e3, max(event["dur"] / 1e3, 0.001))]
            axes.broken_barh(bar, (row - _HEIGHT / 2, _HEIGHT), color=COLOURS[event["cat"]], linewidth=0)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.set_yticks(range(len(found)), [name for name, _ in found], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"Step {number} of {document['otherData']['job_id']}", fontsize=10)
    _legend(axes, found)
    save_figure(figure, path)


def _extent(document: dict[str, Any], number: int) -> tuple[float, float]:
    steps = [e for e in document["traceEvents"] if e.get("cat") == "step" and e["args"]["step"] == number]
    return min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)


def _legend(axes: Any, found: Sequence[Lane]) -> None:
    from matplotlib.patches import Patch

    drawn = {event["cat"] for _, events in found for event in events}
    patches = [Patch(color=colour, label=phase) for phase, colour in COLOURS.items() if phase in drawn]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
