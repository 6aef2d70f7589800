"""``bagua doctor``: is this machine fit, and how to mend what is not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from bagua.cli.command import command
from bagua.cli.options import Output

if TYPE_CHECKING:
    from bagua.cli.checks.machine import Finding


BUILT = {"core": "native core", "c10d": "backend of torch.distributed"}


def built(build: bool) -> list[Finding]:
    """Native modules: built, or built now if ``build``."""
    from bagua.base.errors import BuildError
    from bagua.cli.checks.machine import FAIL, OK, WARN, Finding
    from bagua.cli.cluster import native
    from bagua.cli.display.terminal import open_terminal

    failed = {}
    for kind, name in BUILT.items() if build else ():
        terminal = open_terminal(quiet=False, aside=True)
        try:
            with native.NativeBuild(kind) as building:
                building.wait(terminal.advance)
        except BuildError as error:
            failed[kind] = Finding(name, FAIL, str(error), "Mend what it says, then `bagua doctor --build`.")
        finally:
            terminal.close()
    try:
        described = native.describe()
    except BuildError as error:
        return [Finding("native core", FAIL, str(error), "Mend what it says.")]
    missing = described.get("problem") or "not built yet"
    fix = "bagua doctor --build (else the first run that needs it builds it, and says how far it is)"
    found = {
        kind: Finding(name, OK, path) if (path := described[f"built {kind}"]) else Finding(name, WARN, missing, fix)
        for kind, name in BUILT.items()
    }
    return list((found | failed).values())


def findings(build: bool) -> list[Finding]:
    from bagua.cli.checks import crypto_checks, gpu_checks
    from bagua.cli.checks.machine import CHECKS

    return [*(check() for check in CHECKS), crypto_checks.encryption(), *gpu_checks.findings(), *built(build)]


@command()
def doctor(
    *,
    build: bool = typer.Option(
        False, "--build", help="Build the native core and the backend of torch.distributed if they are not built."
    ),
    output: Output,
) -> None:
    """Checks this machine, and says how to mend what is missing.

    Exit code 1 if something needed is missing.
    """
    from bagua.cli.checks.machine import FAIL

    found = findings(build)
    fit = all(finding.status != FAIL for finding in found)
    document = {"fit": fit, "checks": [dataclasses.asdict(finding) for finding in found]}
    output.show(document, lambda: show(found, fit))
    raise typer.Exit(0 if fit else 1)


def show(findings: list[Finding], fit: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from bagua.cli.display.tables import console

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        mark = Text(finding.status, style=colours[finding.status])
        table.add_row(mark, Text(finding.name), Text(finding.detail))
        if finding.fix:
            table.add_row("", "", Text(f"→ {finding.fix}", style="italic"))
    out = console()
    out.print(table)
    out.print("This machine is fit." if fit else "Something needed is missing.", highlight=False)
