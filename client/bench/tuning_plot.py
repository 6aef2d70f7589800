"""A picture of the trials of a job that tunes itself."""

from __future__ import annotations

from pathlib import Path

from bagua.bench.plots import new_figure, save_figure
from bagua.proto import job_pb2


def plot_trials(found: job_pb2.Tuning, path: Path) -> None:
    """Step time of each candidate in that of the setting with which it was compared, with the spread of both, in their
    order; those that were taken stand out. Raises ConfigError."""
    figure, (axes,) = new_figure(1)
    measured = [one for one in found.trials if one.steps]
    for taken, colour, label in ((True, "tab:green", "taken"), (False, "0.6", "not taken")):
        some = [(number, one) for number, one in enumerate(measured, 1) if (one.state == "better") is taken]
        if not some:
            continue
        ratios = [one.ratio for _, one in some]
        spreads = [one.spread / max(one.against_seconds, 1e-9) for _, one in some]
        axes.errorbar([n for n, _ in some], ratios, yerr=spreads, fmt="o", color=colour, capsize=3, label=label)
    axes.axhline(1.0, color="0.3", linestyle="--", linewidth=1.0)
    axes.set_xlabel("candidate")
    axes.set_ylabel("step time, in that of the setting in use")
    axes.set_title(f"{found.study.model_text} on {found.study.network_text}", fontsize="medium")
    if measured:
        axes.legend()
    save_figure(figure, path)
