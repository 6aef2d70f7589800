"""Draws the pictures of the top README from the tables of performance.md and accuracy.md: ``python docs/plots.py``.

The tables hold what was measured, so pictures and tables can't differ. Needs ``pip install "bagua[bench]"``.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua.bench.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parent
SHARES = (2.0, 1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
COLOURS = {"bagua": "#1f77b4", "peer": "#b0b0b0", "third": "#ff7f0e"}


def table(page: str, heading: str, which: int = 0) -> list[dict[str, str]]:
    """Rows of a table whose first heading is ``heading``, by heading ("bytes", "bytes 2" …). ``which``: 0 for the first
    such table. Raises ValueError if there is none."""
    lines = (DOCS / page).read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if cells(line)[:1] == [heading]]
    if which >= len(starts):
        raise ValueError(f"{page} has no table {which} that begins with {heading!r}")
    names: list[str] = []
    for name in cells(lines[starts[which]]):
        names.append(f"{name} {names.count(name) + 1}" if name in names else name)
    body = itertools.takewhile(cells, lines[starts[which] + 2 :])
    return [dict(zip(names, cells(line), strict=True)) for line in body]


def cells(line: str) -> list[str]:
    """The cells of a line of a table; none of another line."""
    return [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []


def numbers(cell: str) -> list[float]:
    """The numbers before a parenthesis: two for a range."""
    return [float(number) for number in re.findall(r"[\d.]+", cell.partition("(")[0])]


def share(cell: str) -> float:
    """1/13.3 as a number."""
    return 1 / float(cell[2:]) if cell.startswith("1/") else float(cell)


def draw_bars(axes: Axes, place: int, values: list[float], colour: str, label: str, **more: Any) -> Any:
    """Draws the bars of one of three series; ``place``: 0, 1 or 2."""
    at = [index + 0.27 * (place - 1) for index in range(len(values))]
    return axes.bar(at, values, 0.25, color=COLOURS[colour], label=label, **more)


def allreduce(path: Path) -> None:
    """Times as fast as Gloo over size; a bar reaches from the least to the most that was measured."""
    rows = table("performance.md", "ranks of one host")
    sizes = list(rows[0])[1:]
    figure, (axes,) = new_figure(1)
    for place, (row, colour) in enumerate(zip(rows, ("bagua", "third", "peer"), strict=True)):
        spans = [numbers(row[size]) for size in sizes]
        middles = [(span[0] + span[-1]) / 2 for span in spans]
        halves = [(span[-1] - span[0]) / 2 for span in spans]
        draw_bars(axes, place, middles, colour, row["ranks of one host"].replace("`", ""), yerr=halves, capsize=3)
    axes.axhline(1, color="0.3", linewidth=1)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_xlabel("size of the vector, float32")
    axes.set_ylabel("times as fast as Gloo")
    axes.set_title("All-reduce inside a host")
    axes.legend()
    save_figure(figure, path)


def steps(path: Path) -> None:
    """Step times of models between two hosts, as multiples of the step without communication."""
    full, best = (
        {row["model, network"]: row for row in table("performance.md", "model, network", which)} for which in (0, 1)
    )
    names = list(best)
    bars = {
        "DDP": [_times(full[name], "DDP") for name in names],
        "DDP with PowerSGD's hook": [_times(best[name], "DDP, PowerSGD's hook") for name in names],
        "Bagua, streaming_diloco": [_times(best[name], "`streaming_diloco`") for name in names],
    }
    figure, (axes,) = new_figure(1)
    for place, ((label, values), colour) in enumerate(zip(bars.items(), ("peer", "third", "bagua"), strict=True)):
        axes.bar_label(draw_bars(axes, place, values, colour, label), fmt="%.3g", fontsize=8)
    axes.set_yscale("log")
    axes.axhline(1, color="0.3", linewidth=1)
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
    axes.set_ylabel("times the step without communication")
    axes.set_title("Training steps between two hosts")
    axes.legend()
    save_figure(figure, path)


def _times(row: dict[str, str], column: str) -> float:
    return float(row[column]) / float(row["no communication"])


def accuracy(path: Path) -> None:
    """Held-out results over bytes sent, a point for each algorithm; both axes as differences from full gradients."""
    rows = table("accuracy.md", "algorithm, and optimizer if it is not AdamW")
    figure, both = new_figure(2)
    for axes, task, (difference, sent) in zip(
        both, ("digits", "charlm"), (("difference", "bytes"), ("difference 2", "bytes 2")), strict=True
    ):
        points(axes, [(share(row[sent]), _signed(row[difference]), _name(row)) for row in rows])
        axes.set_title(f"{task}: held-out result over bytes sent")
    both[0].set_ylabel("accuracy, points better or worse")
    both[1].set_ylabel("loss, % better or worse")
    both[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    save_figure(figure, path)


def points(axes: Axes, found: list[tuple[float, float, str]]) -> None:
    """A numbered point for each algorithm. Those far below stand at the edge, with their value in the legend."""
    lowest = -3.0
    for index, (sent, difference, name) in enumerate(found, 1):
        far = difference < lowest
        label = f"{name} ({difference:.0f} %)" if far else name
        colour = COLOURS["third" if far else "bagua"]
        height = max(difference, lowest)
        axes.plot(
            sent,
            height,
            linestyle="",
            marker=f"${index}$",
            color=colour,
            markersize=7 if index < 10 else 11,
            label=label,
        )
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xticks(SHARES, [f"1/{round(1 / value)}" if value < 1 else f"{value:.0f}" for value in SHARES])
    axes.minorticks_off()
    axes.axhline(0, color="0.3", linewidth=1)
    axes.grid(True, alpha=0.3)
    axes.set_xlabel("bytes that one host sends, as a share of full gradients")


def _signed(cell: str) -> float:
    found = re.search(r"[-+][\d.]+", cell)
    if found is None:
        raise ValueError(f"{cell!r} is no difference")
    return float(found[0])


def _name(row: dict[str, str]) -> str:
    """The algorithm with its codec, without its other settings; "flat" if it is not hierarchical."""
    text = next(iter(row.values())).split("`")[1]
    codec = re.search(r"codec=(\w+)", text.replace("warmup_codec", ""))
    flat = " flat" if "hierarchical=false" in text else ""
    return text.partition(":")[0] + (f" {codec[1]}" if codec else "") + flat


if __name__ == "__main__":
    allreduce(DOCS / "allreduce.png")
    steps(DOCS / "steps.png")
    accuracy(DOCS / "accuracy.png")
