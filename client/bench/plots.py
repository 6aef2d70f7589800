"""Plots of reports. matplotlib is optional (``pip install bagua[bench]``): without it they are refused with words."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua.base.errors import ConfigError
from bagua.bench.report import Row
from bagua.bench.units import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR_STYLE: dict[str, Any] = {"color": "0.5", "linestyle": "--", "linewidth": 1.5}


def check(path: Path) -> None:
    """Raises ConfigError, before anything is measured, if ``path`` can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib: pip install 'bagua[bench]', or leave --plot out.")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: the name must end with .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}.")


def _figure(columns: int) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure of axes side by side, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from error


def _names(rows: Sequence[Row], key: str) -> list[Any]:
    """Values of ``key``, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def plot_allreduce(report: dict[str, Any], path: Path) -> None:
    """Algorithm bandwidth over size, both logarithmic: a line per system, the floor of the uncoded vector dashed, a
    picture per network."""
    networks = _names(report["rows"], "network")
    figure, all_axes = _figure(len(networks))
    for axes, network in zip(all_axes, networks, strict=True):
        rows = [row for row in report["rows"] if row["network"] == network]
        for system in _names(rows, "system"):
            points = [(row["bytes"], row["algbw"]) for row in rows if row["system"] == system]
            axes.plot(*zip(*points, strict=True), marker="o", label=system)
        first = rows[0]["system"]
        floor = [
            (row["bytes"], row["bytes"] / row["floor_ms"] / 1e6)
            for row in rows
            if row["system"] == first and row["floor_ms"]
        ]
        if floor:
            axes.plot(*zip(*floor, strict=True), label="floor", **FLOOR_STYLE)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = _names(rows, "bytes")
        axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30)
        axes.set_xlabel("size")
        axes.set_ylabel("algorithm bandwidth, GB/s")
        settings = report["settings"]
        shape = f"{settings['nnodes']} x {settings['nproc_per_node']} ranks"
        axes.set_title(f"all-reduce of {settings['dtype']}, {shape}" + (f", {network}" if network else ""))
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    _save(figure, path)
