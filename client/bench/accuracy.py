"""``bagua bench accuracy``: the tasks and settings, and the rows, verdicts and plots that are made of the results.

The hyper-parameters of every algorithm stand here, once, for people to copy. All train on the same number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bagua.bench.plots import new_figure, plain_log_ticks, save_figure
from bagua.bench.report import Column, Row, number, text, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Task:
    """A training: its length, its learning rate, and how near to gradient all-reduce a result must come."""

    name: str
    result: str  # the measure at the end, of the mean of all replicas
    steps: int
    lr: float
    beta2: float  # of Adam
    batch_size: int  # Per rank
    seeds: int
    bound: float  # Allowed loss of accuracy, in points, or of loss, in per cent
    percent: bool


TASKS = {
    "digits": Task(
        "digits", "accuracy", steps=360, lr=3e-3, beta2=0.999, batch_size=32, seeds=3, bound=0.5, percent=False
    ),
    "charlm": Task("charlm", "loss", steps=800, lr=9e-3, beta2=0.99, batch_size=12, seeds=1, bound=2.0, percent=True),
}


@dataclass(frozen=True)
class Setting:
    """An algorithm with the hyper-parameters that it is trained with.

    ``algorithm``: as ``--algorithm`` has it; {tenth}, {quarter} and {half} stand for that part of the steps.
    ``optimizer``: adamw, muon (and AdamW for all but matrices), sgd, or that of the algorithm, with its settings in the
    same manner. ``rates``: for a task by its name, what its learning rate is multiplied with, if it is not 1; sgd has
    its own. Where replicas' weights are averaged instead of gradients, each Adam sees the noise of a smaller batch, and
    takes smaller steps for it.
    """

    name: str
    algorithm: str
    optimizer: str = "adamw"
    rates: Mapping[str, float] = field(default_factory=dict)


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
    Setting("top_k", "top_k:density=0.2,warmup_steps={quarter}", rates={"charlm": 4 / 3}),
    Setting("power_sgd", "power_sgd:rank=8,start_after={quarter}"),
    Setting("decentralized", "decentralized", rates={"charlm": 2}),
    Setting("shift_one", "decentralized:hierarchical=false,peer_selection_mode=shift_one", rates={"charlm": 4 / 3}),
    Setting("low_precision_decentralized", "low_precision_decentralized", rates={"charlm": 4 / 3}),
    Setting("async", "async:sync_interval_ms=0,warmup_steps={quarter}", rates={"charlm": 2}),
    Setting("local_sgd", "local_sgd:interval=4,warmup_steps={quarter}", rates={"charlm": 2}),
    Setting("diloco", "diloco:interval=8,outer_momentum=0.5,warmup_steps={quarter}", rates={"charlm": 2}),
    Setting(
        "streaming_diloco",
        "streaming_diloco:interval=12,overlap=3,mixing=0.15,warmup_steps={quarter},warmup_codec=minmax8",
    ),
    Setting("muon", "gradient_allreduce", "muon"),
    Setting(
        "mu_loco",
        "streaming_diloco:interval=24,overlap=3,mixing=0.15,codec=int2,warmup_steps={quarter},warmup_codec=minmax8",
        "muon",
    ),
    Setting("no_loco", "no_loco:interval=8,warmup_steps={quarter}", rates={"charlm": 2}),
    Setting("qadam", "qadam", "qadam:floor=0.1"),
    Setting("qadam_1bit", "qadam:codec=onebit,scaled=true", "qadam:floor=0.1"),
    Setting("one_bit_adam", "one_bit_adam", "one_bit_adam"),
    Setting("zero_one_adam", "zero_one_adam", "zero_one_adam:var_update_scaler={quarter}"),
)


def config(
    tasks: Sequence[str], names: Sequence[str], seeds: int | None, share: float, validation: bool
) -> dict[str, Any]:
    """Configuration for the ranks: tasks and settings, the baseline first. ``share``: of the steps, for a quick look.
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
    Column("later_text", "second half", text),
    Column("ms_per_step", "ms/step"),
    Column("verdict", "equal", text),
)


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each task and algorithm, with the means over seeds, from the runs that ranks report."""
    rows = []
    for task_name in values_of(runs, "task"):
        task = TASKS[task_name]
        of_task = [run for run in runs if run["task"] == task_name]
        groups = {
            name: [run for run in of_task if run["algorithm"] == name] for name in values_of(of_task, "algorithm")
        }
        baseline = groups[BASELINE]
        wanted, full = fmean(run["value"] for run in baseline), fmean(run["bytes_per_step"] for run in baseline)
        for name, found in groups.items():
            rows.append(_row(task, name, found, wanted, full))
    return rows


def _row(task: Task, name: str, runs: Sequence[Mapping[str, Any]], wanted: float, full: float) -> Row:
    """Makes one row. ``difference``: in points, or in per cent of the baseline; positive is better."""
    values = [run["value"] for run in runs]
    value = fmean(values)
    difference = 100 * (1 - value / wanted) if task.percent else 100 * (value - wanted)
    spread = 100 * (max(values) - min(values)) / (wanted if task.percent else 1)
    unit = "%" if task.percent else "points"
    sent, later = fmean(run["bytes_per_step"] for run in runs), fmean(_later_bytes(run["curve"]) for run in runs)
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
        "later_share": later / full if full else None,
        "ms_per_step": fmean(run["ms_per_step"] for run in runs),
        "curves": [run["curve"] for run in runs],
        "value_text": f"{value:.4f}" if task.percent else f"{value:.2%}",
        "difference_text": f"{round(difference, 2) + 0.0:+.2f} {unit}",  # no -0.00
        "spread_text": f"{spread:.2f} {unit}" if len(values) > 1 else "-",
        "share_text": _share_text(sent, full),
        "later_text": _share_text(later, full),
        "verdict": "yes" if difference >= -task.bound else "NO",
    }


def _later_bytes(curve: Sequence[Sequence[float]]) -> float:
    """Bytes per step in the second half of a training, when warm-ups are over."""
    (first, _, before, _), (last, _, after, _) = curve[(len(curve) - 1) // 2], curve[-1]
    return (after - before) / max(1, last - first)  # the curve of a short training may have one point


def _share_text(sent: float, full: float) -> str:
    if not full:
        return "-"
    # Closer to it the text would be 1/1.
    return f"1/{number(full / sent)}" if full > 1.005 * sent > 0 else number(sent / full)


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line per algorithm: result, difference and shares of bytes of each task. Results that are too far
    from the baseline's are marked with ``**``."""
    tasks = [TASKS[name] for name in values_of(rows, "task")]
    found = {(row["task"], row["algorithm"]): row for row in rows}
    heads = [f"{task.name}: {task.result} | difference | bytes | second half" for task in tasks]
    lines = [
        f"| algorithm, and optimizer if it is not AdamW | {' | '.join(heads)} |",
        "|---" * (1 + 4 * len(tasks)) + "|",
    ]
    for name in values_of(rows, "algorithm"):
        cells = [_label(next(row for row in rows if row["algorithm"] == name)["settings"])]
        for task in tasks:
            row = found[task.name, name]
            mark = "" if row["equal"] else "**"
            cells += [row["value_text"], f"{mark}{row['difference_text']}{mark}", row["share_text"], row["later_text"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _label(setting: Mapping[str, Any]) -> str:
    """An algorithm with what it was trained with."""
    parts = [f"`{setting['algorithm']}`"]
    if setting["optimizer"] != "adamw":
        parts.append(f"`{setting['optimizer']}`")
    parts += [f"{task}: rate x {number(rate)}" for task, rate in setting["rates"].items()]
    return ", ".join(parts)


def plot(report: dict[str, Any], path: Path) -> None:
    """Training loss over time and over bytes sent, of the first seed; a line of pictures per task."""
    tasks = values_of(report["rows"], "task")
    figure, all_axes = new_figure(2, len(tasks))
    for line, task in enumerate(tasks):
        rows = [row for row in report["rows"] if row["task"] == task]
        over_time, over_bytes = all_axes[2 * line], all_axes[2 * line + 1]
        _curves(over_time, rows, 1, 1.0)
        over_time.set(xlabel="seconds", ylabel="training loss", title=f"{task}: loss over time")
        _curves(over_bytes, rows, 2, 1e6)
        over_bytes.set(xlabel="MB sent by one host", title=f"{task}: loss over bytes", xscale="log")
        over_bytes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    save_figure(figure, path)


def _curves(axes: Axes, rows: Sequence[Row], place: int, unit: float) -> None:
    """A line per row: the loss over what stands at ``place`` of the points, in ``unit``."""
    for number_of_row, row in enumerate(rows):
        # Bytes stand on a logarithmic axis, which has no zero.
        points = [point for point in row["curves"][0] if point[place] > 0]
        style = ("-", "--", ":", "-.")[number_of_row // 10 % 4]  # matplotlib has ten colours
        xs, ys = [point[place] / unit for point in points], [point[3] for point in points]
        axes.plot(xs, ys, label=row["algorithm"], linestyle=style, linewidth=1.2)
    plain_log_ticks(axes)
    axes.grid(True, which="both", alpha=0.3)
