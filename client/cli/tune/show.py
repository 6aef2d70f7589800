"""``bagua tune``: what jobs have found that tune themselves (``--autotune``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagua.base.errors import UsageError
from bagua.cli.command import connected as connect
from bagua.cli.job.submit import print_json
from bagua.cli.options import CoordinatorOption, Output, OutputOption, TlsOption, TokenFileOption

if TYPE_CHECKING:
    from bagua.proto import common_pb2, job_pb2

tune = typer.Typer(help="What jobs have found that tune themselves (--autotune).", no_args_is_help=True)
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id, or the beginning of one.")]


@tune.command("list")
def list_all(
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Lists models and networks that were tuned, and the best setting of each."""
    with connect(coordinator, token_file, tls) as client:
        found = client.tunings()
    if output is Output.json:
        print_json({"tunings": [document(one) for one in found]})
        return
    from bagua.cli.display.tables import clock, table

    rows = []
    for one in found:
        model, network = one.study.model_text, one.study.network_text
        tried, since = str(one.tried), clock(one.updated_at)
        rows.append((one.id, model, network, tried, state(one), words(one.best), one.job_id, since))
    table(("ID", "MODEL", "NETWORK", "TRIED", "STATE", "BEST", "JOB", "SINCE"), rows)


@tune.command()
def show(
    id: IdArgument,
    plot: Path | None = typer.Option(None, help="Draw all trials: a .png, .svg or .pdf file.", show_default=False),
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Shows settings that were tried, their step times with spread, what was taken, and why."""
    if plot is not None:
        from bagua.bench import plots

        plots.check(plot)
    with connect(coordinator, token_file, tls) as client:
        found = client.tuning(id)
    if plot is not None:
        from bagua.bench.tuning_plot import plot_trials

        plot_trials(found, plot)
    if output is Output.json:
        print_json(document(found))
        return
    from bagua.cli.display.tables import table

    print(f"{found.study.model_text} on {found.study.network_text}: {state(found)}. Best: {words(found.best)}.")
    if found.line:
        print(found.line)
    headings = ("JOB", "STEP", "SETTING", "STEP TIME, ms", "EXPOSED, ms", "AGAINST", "STEP TIME, ms", "RESULT", "WHY")
    table(headings, [_row(one) for one in found.trials])


@tune.command()
def forget(
    id: Annotated[str, typer.Argument(metavar="[ID]", help="Id, or the beginning of one.", show_default=False)] = "",
    all: bool = typer.Option(False, "--all", help="Everything that was tuned."),
    output: OutputOption = Output.text,
    coordinator: CoordinatorOption = None,
    token_file: TokenFileOption = None,
    tls: TlsOption = None,
) -> None:
    """Forgets what was found: the next job begins with the defaults."""
    if bool(id) == all:
        raise UsageError("Give an ID, or --all. [BG103]")
    with connect(coordinator, token_file, tls) as client:
        forgotten = client.forget_tuning(id, all)
    if output is Output.json:
        print_json({"forgotten": list(forgotten)})
        return
    for one in forgotten:
        print(f"forgotten: {one}")


def state(found: job_pb2.Tuning) -> str:
    """For people."""
    return "settled" if found.settled else "being tuned"


def words(setting: Mapping[str, str]) -> str:
    """A setting, for people."""
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


def document(found: job_pb2.Tuning) -> dict[str, Any]:
    """As JSON. Times in seconds."""
    return {
        "id": found.id,
        "model": found.study.model_text,
        "network": found.study.network_text,
        "settled": found.settled,
        "best": dict(found.best),
        "line": found.line,
        "job_id": found.job_id,
        "updated_at": found.updated_at,
        "tried": found.tried,
        "trials": [
            {
                "job_id": one.job_id,
                "step": one.step,
                "round": one.round,
                "setting": dict(one.setting),
                "against": dict(one.against),
                "ratio": one.ratio,
                "level": one.level,
                "seconds": one.seconds,
                "spread": one.spread,
                "exposed": one.exposed,
                "against_seconds": one.against_seconds,
                "against_spread": one.against_spread,
                "against_exposed": one.against_exposed,
                "steps": one.steps,
                "state": one.state,
                "reason": one.reason,
            }
            for one in found.trials
        ],
    }
