"""``bagua bench accuracy``: the examples trained with every algorithm, beside gradient all-reduce."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import typer

from bagua.bench import accuracy as runs
from bagua.bench.units import choose
from bagua.cli.bench import common
from bagua.cli.command import command
from bagua.cli.job_options import option
from bagua.cli.options import Output, checked

NAMES = tuple(setting.name for setting in runs.SETTINGS)


class Form(StrEnum):
    """Form in which the table is printed."""

    text = "text"
    json = "json"
    markdown = "markdown"


@command()
def accuracy(
    *,
    only: str = typer.Option(
        "",
        "--only",
        metavar="NAME,NAME",
        help=f"Some of: {', '.join(NAMES)}. Default: all. {runs.BASELINE} is always there.",
    ),
    tasks: str = typer.Option("digits,charlm", help="digits, charlm, or both with commas."),
    seeds: int | None = typer.Option(None, "--seeds", min=1, max=100, help="Default: digits 3, charlm 1."),
    share: float = typer.Option(1.0, min=0.01, max=10.0, help="Share of the steps: less for a quick look."),
    validation: bool = typer.Option(
        False,
        "--validation",
        help="For choosing hyper-parameters: measures on a part of the training data, which is not trained on then.",
    ),
    nnodes: int = typer.Option(2, "--nnodes", min=1, max=64, help="Node daemons."),
    nproc_per_node: Annotated[int, option("nproc_per_node")] = 2,
    report: common.Report,
    output: Form = typer.Option(Form.text, "--output", help="json: one document for programs. markdown: for a README."),
) -> None:
    """Trains digits and charlm with every algorithm, all on the same number of
    samples: accuracy, or loss, beside gradient all-reduce.

    result: of the mean of all replicas at the end, mean over seeds. spread:
    between the best and the worst seed. bytes/step: sent by one host. equal:
    not worse by more than 0.5 points of accuracy, or 2 % of loss. The picture
    shows loss over time and over bytes. The whole table takes about a quarter
    of an hour on two cores.
    """
    from bagua.cli.bench.tasks import Task, measure

    chosen = checked(choose, only, NAMES, "--only") if only else list(NAMES)
    config = runs.config(checked(choose, tasks, tuple(runs.TASKS), "--tasks"), chosen, seeds, share, validation)
    settings = {"nnodes": nnodes, "nproc_per_node": nproc_per_node, **config}
    task = Task("bagua.bench.ranks.accuracy", config, nnodes, nproc_per_node, quiet=report.quiet)
    rows = runs.rows_of(measure(task, None)["runs"])
    if output is Form.markdown:
        report = replace(report, output=Output.text)
        report.show("accuracy", settings, rows, lambda: print(runs.markdown(rows), flush=True), runs.plot)
    else:
        replace(report, output=Output(output)).show_table("accuracy", settings, rows, runs.COLUMNS, runs.plot)
