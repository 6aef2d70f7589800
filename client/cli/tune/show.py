from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bagua.cli.command import Connect, command
from bagua.cli.display.documents import tuning_document
from bagua.cli.options import Output

if TYPE_CHECKING:
    from bagua.proto import common_pb2, job_pb2


@command()
def show(
    *,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id, or the beginning of one.")],
    plot: Path | None = typer.Option(None, help="Draw all trials: a .png, .svg or .pdf file."),
    output: Output,
    connect: Connect,
) -> None:
    """Shows settings that were tried, their step times with spread, what was taken, and why."""
    if plot is not None:
        from bagua.bench import plots

        plots.check(plot)
    with connect() as client:
        found = client.tuning(id)
    if plot is not None:
        plots.plot_trials(found, plot)
    output.show(tuning_document(found), lambda: _print(found))


def _print(found: job_pb2.Tuning) -> None:
    from bagua.cli.display.tables import table

    print(f"{found.study.model_text} on {found.study.network_text}: {state(found)}. Best: {words(found.best)}.")
    if found.line:
        print(found.line)
    headings = ("JOB", "STEP", "SETTING", "STEP TIME, ms", "EXPOSED, ms", "AGAINST", "STEP TIME, ms", "RESULT", "WHY")
    table(headings, [_row(one) for one in found.trials])


def state(found: job_pb2.Tuning) -> str:
    return "settled" if found.settled else "being tuned"


def words(setting: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(setting.items())) or "the defaults"


def _row(one: common_pb2.TuneTrial) -> tuple[str, ...]:
    return (
        one.job_id,
        str(one.step),
        words(one.setting),
        _ms(one.seconds, one.spread),
        f"{one.exposed * 1e3:.2f}",
        words(one.against),
        _ms(one.against_seconds, one.against_spread),
        "taken" if one.state == "better" else one.state,
        one.reason,
    )


def _ms(seconds: float, spread: float) -> str:
    return f"{seconds * 1e3:.2f} ± {spread * 1e3:.2f}"
