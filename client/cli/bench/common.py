"""Options of ``bagua bench``, and the end of each of its commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bagua.base.errors import UsageError
from bagua.bench import plots, report
from bagua.bench.emulation import MOST_HOSTS, check_possible
from bagua.cli.options import Output, checked
from bagua.tuning.network import Network, parse_network

EmulateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--emulate",
        metavar="RATE[,DELAY]",
        help="Two hosts (or --nnodes) as network namespaces with such a wire between them, for example 1gbit, "
        "100mbit,5ms (one way) or none; may be repeated. Needs root.",
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the result (pip install bagua\\[bench]).")
]
SaveOption = Annotated[Path | None, typer.Option("--save", metavar="FILE.json", help="Write the result as JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result and errors.")]
SecondsOption = Annotated[float, typer.Option("--seconds", min=0.0, help="Time for each row of the result, about.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="The fewest rounds, however long they take.")]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, help="Computing threads of a rank.")]


def networks_of(emulate: list[str] | None, nnodes: int | None) -> tuple[list[Network | None], int]:
    """Returns (networks to measure in, nodes): [None] is this machine as it is. Raises UsageError, also
    for --emulate without root.
    """
    if not emulate:
        return [None], nnodes or 1
    if nnodes is not None and not 2 <= nnodes <= MOST_HOSTS:
        raise UsageError(f"--emulate makes 2 to {MOST_HOSTS} hosts: --nnodes {nnodes} does not fit. [BG102]")
    found = [checked(parse_network, text) for text in emulate]
    for network in found:
        checked(check_possible, network, nnodes or 2)
    return list(found), nnodes or 2


def command_line() -> str:
    """The command that was called, for the report."""
    return shlex.join(["bagua", *sys.argv[1:]])


@dataclass(frozen=True)
class Report:
    """Where the results of a benchmark go: ``--output``, ``--plot``, ``--save`` and ``--quiet`` of its command. Raises
    UsageError, before anything is measured, for a picture that can't be drawn."""

    output: Output
    plot: Path | None
    save: Path | None
    quiet: bool

    def __post_init__(self) -> None:
        if self.plot is not None:
            checked(plots.check, self.plot)

    def show(
        self,
        name: str,
        settings: Mapping[str, Any],
        rows: Sequence[report.Row],
        print_rows: Callable[[], None],
        draw: Callable[[dict[str, Any], Path], None],
    ) -> None:
        """Saves and draws the report of benchmark ``name``, and prints it as it was asked for."""
        found = report.document(name, command_line(), settings, rows)
        if self.save is not None:
            report.save(found, self.save)
        if self.plot is not None:
            draw(found, self.plot)
        self.output.show(found, print_rows)

    def show_table(
        self,
        name: str,
        settings: Mapping[str, Any],
        rows: Sequence[report.Row],
        columns: Sequence[report.Column],
        draw: Callable[[dict[str, Any], Path], None],
    ) -> None:
        """The same with a table of those ``columns`` that have values."""
        from bagua.cli.display.tables import table

        shown = report.present(rows, columns)
        headings = [column.heading for column in shown]
        self.show(name, settings, rows, lambda: table(headings, report.cells(rows, shown)), draw)
