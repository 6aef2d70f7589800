"""Pictures of the study. Needs ``pip install "bagua[bench]"``."""

import statistics

from bagua.bench.plots import new_figure
from bagua.tuning.network import Network
from tradeoff.grid import FAMILIES, FULL, TEXTS, best_family, best_of, least_rate, step_ms

FEW, MANY = 8, 32
"""Hosts of the pictures that show two numbers of them; FEW where one is shown."""

LINES = (FULL, "fp16", "bytegrad", "power_sgd", "qadam_1bit", "streaming_diloco", "shift_one", "async")
"""Settings of the pictures over the number of hosts."""

WIRES = (Network(1e9), Network(1e9, 0.005), Network(1e8, 0.02))


DPI = 72
"""Less than elsewhere: maps with a number in each field are large files."""

LIMIT = 2.0
"""A step with full gradients over one without communication, from which on they are said not to pay."""


def rate_text(rate):
    """``100M``, ``1G``."""
    return f"{rate / 1e9:g}G" if rate >= 1e9 else f"{rate / 1e6:g}M"


def draw_all(profiles, grid, folder):
    """All pictures that need no measurement."""
    models = _largest(profiles)
    made = {
        "study-speedup.png": lambda path: speedup(models[0], profiles[models[0]], grid, path),
        "study-best.png": lambda path: best(models, profiles, grid, path),
        "study-hosts.png": lambda path: over_hosts(models[0], profiles[models[0]], grid, path),
        "study-limit.png": lambda path: limit(models, profiles, grid, path),
    }
    for name, draw in made.items():
        draw(folder / name)
    return [folder / name for name in made]


def _largest(profiles):
    """Up to three models, ``resnet`` first where it is there."""
    names = sorted(profiles, key=lambda name: (name != "resnet", -profiles[name].bytes))
    return names[:3]


def _ticks(axes, grid):
    axes.set_xticks(range(len(grid.rates)), [rate_text(rate) for rate in grid.rates])
    axes.set_yticks(range(len(grid.delays)), [f"{delay * 1e3:g}" for delay in grid.delays])
    axes.set_xlabel("bit/s")
    axes.set_ylabel("delay one way, ms")


def speedup(model, profile, grid, path):
    """A map of rate and delay for each family: step of full gradients over that of the family's fastest setting."""
    from matplotlib.colors import LogNorm

    families = [family for family in FAMILIES if family != "full gradients"]
    figure, all_axes = new_figure(3, 2)
    figure.set_size_inches(16, 6.4)
    full = [[step_ms(profile, Network(rate, delay), FEW, FULL) for rate in grid.rates] for delay in grid.delays]
    image = None
    for axes, family in zip(all_axes, families, strict=True):
        times = [
            [
                before / best_of(family, profile, Network(rate, delay), FEW)[1]
                for rate, before in zip(grid.rates, line, strict=True)
            ]
            for delay, line in zip(grid.delays, full, strict=True)
        ]
        image = axes.imshow(times, cmap="YlGn", norm=LogNorm(0.7, 300), aspect="auto", origin="lower")
        for y, line in enumerate(times):
            for x, value in enumerate(line):
                axes.text(
                    x, y, f"{value:.2g}" if value < 99.5 else f"{value:.0f}", ha="center", va="center", fontsize=8
                )
        axes.set_title(family)
        _ticks(axes, grid)
    if image is not None:
        figure.colorbar(image, ax=all_axes, label="times as fast as full gradients", shrink=0.8)
    figure.suptitle(f"{model}, {FEW} hosts: step of full gradients over that of the family's fastest setting")
    figure.savefig(path, dpi=DPI)


def best(models, profiles, grid, path):
    """The family to take over rate and delay, a column per model, FEW and MANY hosts. In a field: its step over the
    one without communication."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = list(FAMILIES)
    colours = [colormaps["Set2"](index) for index in range(len(names))]
    figure, all_axes = new_figure(len(models), 2)
    figure.set_size_inches(5.4 * len(models), 6.8)
    places = [(hosts, model) for hosts in (FEW, MANY) for model in models]
    for axes, (hosts, model) in zip(all_axes, places, strict=True):
        profile = profiles[model]
        found = [[best_family(profile, Network(rate, delay), hosts) for rate in grid.rates] for delay in grid.delays]
        numbers = [[names.index(family) for family, _ in line] for line in found]
        axes.imshow(
            numbers, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto", origin="lower"
        )
        for y, line in enumerate(found):
            for x, (_, step) in enumerate(line):
                times = step / profile.compute_s / 1e3
                axes.text(x, y, f"{times:.2f}", ha="center", va="center", fontsize=8)
        axes.set_title(f"{model}, {hosts} hosts")
        _ticks(axes, grid)
    handles = [Patch(color=colour, label=name) for name, colour in zip(names, colours, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names))
    figure.savefig(path, dpi=DPI)


def over_hosts(model, profile, grid, path):
    """Step over the one without communication, over the number of hosts; a picture per network."""
    figure, all_axes = new_figure(len(WIRES))
    for axes, network in zip(all_axes, WIRES, strict=True):
        for name in LINES:
            times = [step_ms(profile, network, hosts, TEXTS[name]) / profile.compute_s / 1e3 for hosts in grid.hosts]
            axes.plot(grid.hosts, times, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(grid.hosts, [str(hosts) for hosts in grid.hosts])
        axes.set_xlabel("hosts")
        axes.set_title(f"{model}, {network.name}")
        axes.grid(True, which="both", alpha=0.3)
    all_axes[0].set_ylabel("step over the one without communication")
    all_axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=DPI)


def limit(models, profiles, grid, path):
    """The rate from which on a step with full gradients takes at most LIMIT times the one without communication, over
    the number of hosts; a line per delay, a picture per model. No point: no rate is enough."""
    from matplotlib.ticker import FuncFormatter

    figure, all_axes = new_figure(len(models))
    for axes, model in zip(all_axes, models, strict=True):
        for delay in grid.delays:
            rates = [least_rate(profiles[model], delay, hosts, FULL, LIMIT) for hosts in grid.hosts]
            points = [(hosts, rate) for hosts, rate in zip(grid.hosts, rates, strict=True) if rate is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{delay * 1e3:g} ms")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(grid.hosts[0] * 0.9, grid.hosts[-1] * 1.1)
        axes.set_xticks(grid.hosts, [str(hosts) for hosts in grid.hosts])
        axes.set_xlabel("hosts")
        axes.set_ylim(1e8, 1e11)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: rate_text(rate)))
        axes.set_title(model)
        axes.grid(True, which="both", alpha=0.3)
        if axes.get_lines():
            axes.legend(title="delay one way")
    all_axes[0].set_ylabel("bit/s")
    figure.suptitle(
        f"Least rate at which a step with full gradients takes {LIMIT:g} times the one without communication"
    )
    figure.savefig(path, dpi=DPI)


def measured(rows, path):
    """Predicted over measured step times, a colour per case."""
    figure, (axes,) = new_figure(1)
    figure.set_size_inches(7.4, 6)
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for number, case in enumerate(cases):
        points = [(row["measured_ms"], row["predicted_ms"]) for row in rows if row["case"] == case]
        axes.scatter(*zip(*points, strict=True), label=case, alpha=0.75, marker="os^vD"[number % 5])
    ends = [min(row["measured_ms"] for row in rows) * 0.7, max(row["measured_ms"] for row in rows) * 1.4]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    for factor in (0.8, 1.25):
        axes.plot(ends, [end * factor for end in ends], color="0.6", linewidth=1, linestyle="--")
    error = statistics.median(abs(row["error"]) for row in rows)
    axes.set_title(f"{len(rows)} step times between two hosts, median error {error:.1%}; dashed: a quarter off")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, ms per step")
    axes.set_ylabel("predicted, ms per step")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
