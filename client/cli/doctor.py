"""``bagua doctor``: is this machine fit, and how to mend what is not."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import typer

from bagua.cli.options import Output, OutputOption

if TYPE_CHECKING:
    from bagua.cli.checks import Finding

BUILD_DEADLINE_S = 600.0


def core(build: bool) -> Finding:
    """The native core: built, or built now if ``build``. A process of its own: building imports torch."""
    from bagua.cli.checks import FAIL, OK, WARN, Finding

    command = [sys.executable, "-P", "-m", "bagua.csrc.build", *([] if build else ["--check"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("native core", FAIL, str(error), "Run `bagua doctor --build` again and see what it waits for.")
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    words = lines[-1] if lines else ""
    if done.returncode == 0:
        return Finding("native core", OK, words or "built")
    if build:
        return Finding("native core", FAIL, words, "Mend what the compiler says, then `bagua doctor --build`.")
    return Finding("native core", WARN, words or "not built yet", "bagua doctor --build (else the first run builds it)")


def doctor(
    build: bool = typer.Option(False, "--build", help="Build the native core if it is not built."),
    output: OutputOption = Output.text,
) -> None:
    """Checks this machine, and says how to mend what is missing.

    Exit code 1 if something needed is missing.
    """
    from bagua.cli.checks import CHECKS, FAIL

    findings = [check() for check in CHECKS]
    findings.append(core(build))
    fit = all(finding.status != FAIL for finding in findings)
    if output is Output.json:
        print(json.dumps({"fit": fit, "checks": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        show(findings, fit)
    raise typer.Exit(0 if fit else 1)


def show(findings: list[Finding], fit: bool) -> None:
    """Prints the findings as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        mark = Text(finding.status, style=colours[finding.status])
        table.add_row(mark, Text(finding.name), Text(finding.detail))
        if finding.fix:
            table.add_row("", "", Text(f"→ {finding.fix}", style="italic"))
    console = Console()
    console.print(table)
    console.print("This machine is fit." if fit else "Something needed is missing.", highlight=False)
