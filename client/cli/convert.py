"""``bagua convert``: a script for torch's DistributedDataParallel, changed for Bagua."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bagua.base.errors import ConfigError
from bagua.cli.command import command

if TYPE_CHECKING:
    from bagua.convert import Converted


@command(no_args_is_help=True)
def convert(
    scripts: list[Path] = typer.Argument(help="Files of one program, such as train.py."),
    write: bool = typer.Option(False, "--write", help="Write the changes into the files."),
) -> None:
    """Shows how a script for torch's DistributedDataParallel changes for Bagua, as a diff, and what it leaves.

    Changes nothing without --write. Nothing of the script is run.
    """
    from bagua.convert import convert

    given = {}
    for script in scripts:
        try:
            given[str(script)] = script.read_bytes()
        except OSError as error:
            raise ConfigError(f"The script {script} can't be read: {error.strerror}. [BG104]") from error
    found = convert(given)
    for one in found:
        print(_diff(one), end="")
        if write and one.changes:
            try:
                Path(one.name).write_bytes(one.after)
            except OSError as error:
                raise ConfigError(f"The script {one.name} can't be written: {error.strerror}. [BG104]") from error
    sys.stdout.flush()
    for one in found:
        for note in one.notes:
            print(
                f"{one.name}{f':{note.line}' if note.line else ''}: {note.text.replace('{file}', one.name)}",
                file=sys.stderr,
            )
    changes = sum(one.changes for one in found)
    if not changes:
        print("Nothing was changed.", file=sys.stderr)
    elif not write:
        print("Nothing was written: --write does that.", file=sys.stderr)


def _diff(converted: Converted) -> str:
    before, after = (
        data.decode(errors="replace").splitlines(keepends=True) for data in (converted.before, converted.after)
    )
    lines = difflib.unified_diff(before, after, converted.name, converted.name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
