"""Plots of reports. matplotlib is optional (``pip install bagua[bench]``): without it they are refused with words."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua.base.errors import ConfigError
from bagua.bench.report import Row, values_of
from bagua.bench.units import size_text
from bagua.timeline.chrome import lanes, step_in_the_middle, step_of
from bagua.tuning.network import Network, parse_network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bagua.proto import job_pb2

FLOOR_STYLE: dict[str, Any] = {"color": "0.5", "linestyle": "--", "linewidth": 1.5}


def check(path: Path) -> None:
    """Raises ConfigError, before anything is measured, if ``path`` can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib: pip install 'bagua[bench]', or leave --plot out. [BG209]")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path}: the name must end with .png, .svg or .pdf. [BG109]")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}. [BG109]")


def new_figure(columns: int, lines: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """An empty figure of lines of axes side by side, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * columns, 4.8 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(lines, columns, index + 1) for index in range(lines * columns)]
    return figure, axes


def save_figure(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror} [BG109]") from error


def size_axes(axes: Axes, rows: Sequence[Row], label: str) -> None:
    """Makes both axes logarithmic; ``label`` and ticks of the horizontal one are those of sizes."""
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel=label)
    sizes = sorted({row["bytes"] for row in rows if row["bytes"]})
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30)


def plain_log_ticks(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, with ticks such as 20 in place of 2 x 10^1."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.6)))


def plot_allreduce(report: dict[str, Any], path: Path) -> None:
    """Algorithm bandwidth over size, both logarithmic: a line per system, the floor of the uncoded vector dashed, a
    picture per network."""
    networks = values_of(report["rows"], "network")
    figure, all_axes = new_figure(len(networks))
    for axes, network in zip(all_axes, networks, strict=True):
        rows = [row for row in report["rows"] if row["network"] == network]
        for system in values_of(rows, "system"):
            points = [(row["bytes"], row["algbw"]) for row in rows if row["system"] == system]
            axes.plot(*zip(*points, strict=True), marker="o", label=system)
        first = rows[0]["system"]
        floor = [
            (row["bytes"], row["bytes"] / row["floor_ms"] / 1e6)
            for row in rows
            if row["system"] == first and row["floor_ms"]
        ]
        if floor:
            axes.plot(*zip(*floor, strict=True), label="floor", marker=".", **FLOOR_STYLE)
        size_axes(axes, rows, "size")
        settings = report["settings"]
        shape = f"{settings['nnodes']} x {settings['nproc_per_node']} ranks"
        title = f"all-reduce of {settings['dtype']}, {shape}" + (f", {network}" if network else "")
        axes.set(ylabel="algorithm bandwidth, GB/s", title=title)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def plot_codec(report: dict[str, Any], path: Path) -> None:
    """Speed of every codec as bars, memcpy as a line; a picture per size."""
    sizes = values_of(report["rows"], "size")
    figure, all_axes = new_figure(len(sizes))
    kinds = (("encode", "encode"), ("decode_add", "decode-and-add"), ("recode", "recode"))
    for axes, size in zip(all_axes, sizes, strict=True):
        rows = [row for row in report["rows"] if row["size"] == size]
        for index, (key, label) in enumerate(kinds):
            places = [place + (index - 1) * 0.27 for place in range(len(rows))]
            axes.bar(places, [row[key] for row in rows], 0.25, label=label)
        axes.axhline(rows[0]["memcpy"], label="memcpy", **FLOOR_STYLE)
        axes.set_xticks(range(len(rows)), [row["codec"] for row in rows], rotation=30)
        axes.set(ylabel="GB/s of float32, one thread", title=f"codecs, {size}")
        axes.grid(True, axis="y", alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def plot_train(report: dict[str, Any], path: Path) -> None:
    """Step time over the rate of the network, and over its delay, a line per system; a row of pictures per model.
    With one network: bars."""
    rows = report["rows"]
    networks = [parse_network(name) if name else Network() for name in values_of(rows, "network")]
    series = [found for found in (over_rate(networks), over_delay(networks)) if len(found[1]) > 1]
    models = values_of(rows, "model")
    figure, all_axes = new_figure(max(1, len(series)), len(models))
    for index, model in enumerate(models):
        own = [row for row in rows if row["model"] == model]
        if not series:
            _bars(all_axes[index], own, model)
        for column, (label, members) in enumerate(series):
            axes = all_axes[index * len(series) + column]
            _lines(axes, own, label, members)
            axes.set_title(f"{model}: step time over {label}")
    save_figure(figure, path)


def over_rate(networks: Sequence[Network]) -> tuple[str, list[tuple[str, str]]]:
    """Returns (label, [(network, tick)]) of networks of the commonest delay, the slowest first."""
    delays = [network.delay_s for network in networks]
    delay = max(delays, key=delays.count)
    # 0: as fast as it goes.
    chosen = sorted((n for n in networks if n.delay_s == delay), key=lambda n: n.rate or float("inf"))
    label = "bandwidth" + (f", {delay * 1e3:g} ms one way" if delay else "")
    return label, [(n.name, n.name.partition(",")[0].replace("none", "unshaped")) for n in chosen]


def over_delay(networks: Sequence[Network]) -> tuple[str, list[tuple[str, str]]]:
    """The same of networks of the commonest rate, the shortest delay first."""
    rates = [network.rate for network in networks]
    rate = max(rates, key=rates.count)
    chosen = sorted((n for n in networks if n.rate == rate), key=lambda n: n.delay_s)
    label = "latency one way" + (f", {chosen[0].name.partition(',')[0]}" if rate else "")
    return label, [(n.name, f"{n.delay_s * 1e3:g} ms") for n in chosen]


def _lines(axes: Axes, rows: Sequence[Row], label: str, members: Sequence[tuple[str, str]]) -> None:
    """Step times over the members of a series, at equal distances."""
    for system in values_of(rows, "system"):
        found = {row["network"]: row["ms"] for row in rows if row["system"] == system}
        times = [found[name] for name, _ in members]
        alone = {"marker": "o"} if rows[0]["system"] != system else FLOOR_STYLE
        axes.plot(range(len(times)), times, label=system, **alone)
    axes.set_xticks(range(len(members)), [tick for _, tick in members])
    plain_log_ticks(axes)
    axes.set(xlabel=label, ylabel="ms per step")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()


def _bars(axes: Axes, rows: Sequence[Row], model: str) -> None:
    axes.barh([row["system"] for row in rows], [row["ms"] for row in rows])
    axes.invert_yaxis()  # bars begin at the bottom otherwise
    axes.set(xlabel="ms per step", title=model)
    axes.grid(True, axis="x", alpha=0.3)


def plot_network(report: dict[str, Any], path: Path) -> None:
    """Bandwidth between all pairs as a map of colours; a picture per network."""
    networks = values_of(report["rows"], "network")
    figure, all_axes = new_figure(len(networks))
    for axes, network in zip(all_axes, networks, strict=True):
        rows = [row for row in report["rows"] if row["network"] == network]
        names = values_of(rows, "source", "target")
        grid = [[float("nan")] * len(names) for _ in names]
        for row in rows:
            y, x = names.index(row["source"]), names.index(row["target"])
            grid[y][x] = row["gbits"]
            axes.text(x, y, f"{row['gbits']:.3g}\n{row['latency_us']:.0f} us", ha="center", va="center")
        image = axes.imshow(grid, cmap="Blues", vmin=0)
        figure.colorbar(image, ax=axes, label="Gbit/s")
        axes.set_xticks(range(len(names)), names, rotation=30)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="to", ylabel="from", title="between daemons" + (f", {network}" if network else ""))
    save_figure(figure, path)


ADVICE_MARKS = {"yes": ("o", "same result"), "rounded": ("s", "gradients rounded"), "no": ("^", "other result")}


def plot_advice(document: dict[str, Any], path: Path) -> None:
    """Predicted step time over bytes that a host sends, both logarithmic: a point per algorithm and codec. Recommended
    ones have their names."""
    figure, (axes,) = new_figure(1)
    for kept, (mark, label) in ADVICE_MARKS.items():
        points = [(row["sent_bytes"] / 1e6, row["step_ms"]) for row in document["rows"] if row["keeps_result"] == kept]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=mark, label=label, alpha=0.7)
    for row in document["recommended"]:
        axes.annotate(row["algorithm"], (row["sent_bytes"] / 1e6, row["step_ms"]), fontsize=8)
    axes.axhline(document["compute_ms"], label="no communication", **FLOOR_STYLE)
    axes.set_xscale("symlog", linthresh=1e-3)  # some send nothing: a logarithmic axis has no zero
    axes.set_yscale("log")
    shape = f"{document['nodes']} x {document['nproc_per_node']} ranks, {document['network']}"
    axes.set(xlabel="MB sent by a host in a step", ylabel="ms per step, predicted", title=shape)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot_trials(found: job_pb2.Tuning, path: Path) -> None:
    """Step time of each candidate in that of the setting with which it was compared, with the spread of both, in their
    order; those that were taken stand out. Raises ConfigError."""
    figure, (axes,) = new_figure(1)
    measured = [one for one in found.trials if one.steps]  # known candidates were not measured again
    for taken, colour, label in ((True, "tab:green", "taken"), (False, "0.6", "not taken")):
        some = [(number, one) for number, one in enumerate(measured, 1) if (one.state == "better") is taken]
        if not some:
            continue
        ratios = [one.ratio for _, one in some]
        spreads = [one.spread / max(one.against_seconds, 1e-9) for _, one in some]
        axes.errorbar([n for n, _ in some], ratios, yerr=spreads, fmt="o", color=colour, capsize=3, label=label)
    axes.axhline(1.0, color="0.3", linestyle="--", linewidth=1.0)
    axes.set(xlabel="candidate", ylabel="step time, in that of the setting in use")
    axes.set_title(f"{found.study.model_text} on {found.study.network_text}", fontsize="medium")
    if measured:
        axes.legend()
    save_figure(figure, path)


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
            bar = [((event["ts"] - begin) / 1e3, max(event["dur"] / 1e3, 0.001))]  # the shortest is seen, too
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
