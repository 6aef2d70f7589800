"""What ``bagua bench accuracy`` trains, and what becomes of the results: rows, verdicts, plots.

The hyper-parameters of every algorithm stand here, once, for people to copy. All train on the same number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bagua.bench.plots import new_figure, save_figure
from bagua.bench.report import Column, Row, number, text


@dataclass(frozen=True)
class Task:
    """A training: its length, its learning rate, and how near to gradient all-reduce a result must come."""

    name: str
    result: str
    """What is measured at the end, by the mean of all replicas."""
    steps: int
    lr: float
    batch_size: int
    """Per rank."""
    seeds: int
    bound: float
    """Allowed loss of accuracy, in points, or of loss, in per cent."""
    percent: bool


TASKS = {
    "digits": Task("digits", "accuracy", steps=360, lr=3e-3, batch_size=32, seeds=3, bound=0.5, percent=False),
    "charlm": Task("charlm", "loss", steps=600, lr=6e-3, batch_size=12, seeds=1, bound=2.0, percent=True),
}


@dataclass(frozen=True)
class Setting:
    """An algorithm with the hyper-parameters that it is trained with.

    ``algorithm``: as ``--algorithm`` has it; {tenth}, {quarter} and {half} stand for that part of the steps.
    ``optimizer``: adamw, sgd, or that of the algorithm, with its settings in the same manner. ``rate``: times the
    task's learning rate; for sgd the rate itself.
    """

    name: str
    algorithm: str
    optimizer: str = "adamw"
    rate: float = 1.0


BASELINE = "gradient_allreduce"
SETTINGS = (
    Setting(BASELINE, "gradient_allreduce"),
    Setting("fp16", "gradient_allreduce:codec=fp16"),
    Setting("bf16", "gradient_allreduce:codec=bf16"),
    Setting("fp8_e4m3", "gradient_allreduce:codec=fp8_e4m3"),
    Setting("bytegrad", "bytegrad"),
    Setting("bytegrad_everywhere", "bytegrad:hierarchical=false"),
    Setting("int4", "gradient_allreduce:codec=int4"),
    Setting("onebit", "gradient_allreduce:codec=onebit"),
    Setting("top_k", "top_k:density=0.05,warmup_steps={tenth}"),
    Setting("power_sgd", "power_sgd:rank=4,start_after={tenth}"),
    Setting("decentralized", "decentralized"),
    Setting("shift_one", "decentralized:hierarchical=false,peer_selection_mode=shift_one"),
    Setting("low_precision_decentralized", "low_precision_decentralized"),
    Setting("async", "async:sync_interval_ms=10,warmup_steps={tenth}"),
    Setting("local_sgd", "local_sgd:interval=4,warmup_steps={tenth}"),
    Setting("diloco", "diloco:interval=16,warmup_steps={tenth}"),
    Setting("streaming_diloco", "streaming_diloco:interval=16,warmup_steps={tenth}"),
    Setting("no_loco", "no_loco:interval=16,warmup_steps={tenth}"),
    Setting("qadam", "qadam", "qadam:eps=1e-3"),
    Setting("qadam_1bit", "qadam:codec=onebit", "qadam:eps=1e-4"),
    Setting("one_bit_adam", "one_bit_adam", "one_bit_adam"),
    Setting("zero_one_adam", "zero_one_adam", "zero_one_adam:eps=1e-3"),
)


def config(
    tasks: Sequence[str], names: Sequence[str], seeds: int | None, share: float, validation: bool
) -> dict[str, Any]:
    """What ranks are told: tasks and settings, the baseline first. ``share``: of the steps, for a quick look.
    ``validation``: see the command."""
    chosen = [setting for setting in SETTINGS if setting.name in names or setting.name == BASELINE]
    told = [
        replace(task, seeds=seeds or task.seeds, steps=max(20, int(task.steps * share)))
        for task in (TASKS[name] for name in tasks)
    ]
    return {
        "tasks": [asdict(task) for task in told],
        "settings": [asdict(setting) for setting in chosen],
        "validation": validation,
    }


COLUMNS = (
    Column("task", "task", text),
    Column("algorithm", "algorithm", text),
    Column("value_text", "result", text),
    Column("difference_text", "difference", text),
    Column("spread_text", "spread", text),
    Column("bytes_per_step", "bytes/step"),
    Column("share_text", "of baseline", text),
    Column("ms_per_step", "ms/step"),
    Column("verdict", "equal", text),
)


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each task and algorithm, with the means over seeds, from the runs that ranks report."""
    rows = []
    for task_name in dict.fromkeys(run["task"] for run in runs):
        task = TASKS[task_name]
        of_task = [run for run in runs if run["task"] == task_name]
        groups = {name: [run for run in of_task if run["algorithm"] == name] for name in _names(of_task)}
        baseline = groups[BASELINE]
        wanted, full = fmean(run["value"] for run in baseline), fmean(run["bytes_per_step"] for run in baseline)
        for name, found in groups.items():
            rows.append(_row(task, name, found, wanted, full))
    return rows


def _names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["algorithm"] for run in runs))


def _row(task: Task, name: str, runs: Sequence[Mapping[str, Any]], wanted: float, full: float) -> Row:
    """One row. ``difference``: in points, or in per cent of the baseline; positive is better."""
    values = [run["value"] for run in runs]
    value = fmean(values)
    difference = 100 * (1 - value / wanted) if task.percent else 100 * (value - wanted)
    spread = 100 * (max(values) - min(values)) / (wanted if task.percent else 1)
    unit = "%" if task.percent else "points"
    sent = fmean(run["bytes_per_step"] for run in runs)
    return {
        "task": task.name,
        "algorithm": name,
        "settings": runs[0]["settings"],
        "value": value,
        "values": values,
        "difference": difference,
        "equal": difference >= -task.bound,
        "bytes_per_step": sent,
        "share": sent / full if full else None,
        "ms_per_step": fmean(run["ms_per_step"] for run in runs),
        "curves": [run["curve"] for run in runs],
        "value_text": f"{value:.4f}" if task.percent else f"{value:.2%}",
        "difference_text": f"{difference:+.2f} {unit}",
        "spread_text": f"{spread:.2f} {unit}" if len(values) > 1 else "-",
        "share_text": f"1/{number(full / sent)}" if full > sent > 0 else number(sent / full) if full else "-",
        "verdict": "yes" if difference >= -task.bound else "NO",
    }


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line per algorithm: result, difference and share of bytes of each task. Results that are too far
    from the baseline's are marked with ``**``."""
    tasks = [TASKS[name] for name in dict.fromkeys(row["task"] for row in rows)]
    found = {(row["task"], row["algorithm"]): row for row in rows}
    heads = [f"{task.name}: {task.result} | difference | bytes" for task in tasks]
    lines = [
        f"| algorithm, and optimizer if it is not AdamW | {' | '.join(heads)} |",
        "|---" * (1 + 3 * len(tasks)) + "|",
    ]
    for name in _names(rows):
        cells = [_label(next(row for row in rows if row["algorithm"] == name)["settings"])]
        for task in tasks:
            row = found[task.name, name]
            mark = "" if row["equal"] else "**"
            cells += [row["value_text"], f"{mark}{row['difference_text']}{mark}", row["share_text"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _label(setting: Mapping[str, Any]) -> str:
    """An algorithm with what it was trained with."""
    parts = [f"`{setting['algorithm']}`"]
    if setting["optimizer"] != "adamw":
        parts.append(f"`{setting['optimizer']}`")
    if setting["rate"] != 1:
        parts.append(
            f"rate {setting['rate']:g}" if setting["optimizer"].startswith("sgd") else f"rate x {setting['rate']:g}"
        )
    return ", ".join(parts)


def plot(report: dict[str, Any], path: Path) -> None:
    """Training loss over time and over bytes sent, of the first seed; a line of pictures per task."""
    tasks = list(dict.fromkeys(row["task"] for row in report["rows"]))
    figure, all_axes = new_figure(2, len(tasks))
    for line, task in enumerate(tasks):
        rows = [row for row in report["rows"] if row["task"] == task]
        for column, (place, label) in enumerate(((1, "seconds"), (2, "MB sent by one host"))):
            axes = all_axes[2 * line + column]
            for number_of_row, row in enumerate(rows):
                points = row["curves"][0]
                scale = 1e6 if place == 2 else 1.0
                xs, ys = [point[place] / scale for point in points], [point[3] for point in points]
                style = ("-", "--", ":", "-.")[number_of_row // 10 % 4]
                axes.plot(xs, ys, label=row["algorithm"], linestyle=style, linewidth=1.2)
            axes.set_yscale("log")
            if place == 2:
                axes.set_xscale("log")
            axes.set_xlabel(label)
            axes.set_ylabel("training loss")
            axes.set_title(f"{task}: loss over {'bytes' if place == 2 else 'time'}")
            axes.grid(True, which="both", alpha=0.3)
        all_axes[2 * line + 1].legend(fontsize=6, ncols=2)
    save_figure(figure, path)
