"""The commands ``bagua coordinator backup | restore | check``."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import sqlalchemy as sa
import typer

from bagua.base.errors import ConfigError
from bagua.base.option_names import COMMAND_SETTINGS
from bagua.daemon.coordinator.admin.backup import back_up, restore
from bagua.daemon.coordinator.admin.check import Report, check_database
from bagua.daemon.coordinator.admin.settings import Settings, make_settings
from bagua.daemon.coordinator.admin.state_folder import DATABASE, StateFolder
from bagua.daemon.coordinator.store.database import read_only_url, sqlite_url

StateDir = Annotated[Path | None, typer.Option(help="The coordinator's state folder, as it was started with.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="postgresql://…, as the coordinator was started with.")]


class Form(StrEnum):
    text = "text"
    json = "json"


Output = Annotated[Form, typer.Option(help="How to print.")]


def add_commands(app: typer.Typer) -> None:
    """Adds them to ``bagua coordinator``."""
    # Without it typer takes a single command for the program.
    app.callback(context_settings=COMMAND_SETTINGS)(lambda: None)
    for name, command in (("backup", backup), ("restore", restore_command), ("check", check)):
        app.command(name, context_settings=COMMAND_SETTINGS)(command)


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the backup.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write over a file that is there.")] = False,
    output: Output = Form.text,
) -> None:
    """Copies the database into one file, as of one moment, while the coordinator goes on."""
    url = existing_url(make_settings(state_dir=state_dir, database_url=database_url))
    report = back_up(url, file, replace)
    print_report(report, output, f"{file}: {report.line}")


def restore_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `bagua coordinator backup` has written.")],
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where the database holds jobs. A file of SQLite is kept beside.")
    ] = False,
    output: Output = Form.text,
) -> None:
    """Puts a backup in the place of the database. No coordinator may run."""
    settings = make_settings(state_dir=state_dir, database_url=database_url)
    with closing(StateFolder(settings.state_dir)) as folder:  # no coordinator of this machine starts on it meanwhile
        report = restore(file, settings.database_url or sqlite_url(folder.database), replace)
    print_report(report, output, f"restored from {file}: {report.line}")


def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="A backup, or another file of SQLite; default: the coordinator's database."
        ),
    ] = None,
    state_dir: StateDir = None,
    database_url: DatabaseUrl = None,
    output: Output = Form.text,
) -> None:
    """Reads the whole database: is it whole, of which version, and do its rows fit together? Exit code 1: no."""
    if file is not None and not file.is_file():
        raise ConfigError(f"There is no file {file}. [BG818]")
    settings = make_settings(state_dir=state_dir, database_url=database_url)
    report = check_database(existing_url(settings) if file is None else read_only_url(file))
    print_report(report, output, report.line)


def print_report(report: Report, output: Form, line: str) -> None:
    """Prints it; exit code 1 if there are problems."""
    if output is Form.json:
        print(json.dumps({**asdict(report), "ok": not report.problems}))
    else:
        print("\n".join([line, *(f"problem: {words}" for words in report.problems)]))
    if report.problems:
        raise typer.Exit(1)


def existing_url(settings: Settings) -> str:
    """Returns the URL of the coordinator's database. Raises ConfigError if its SQLite file does not exist: no command
    here makes one.
    """
    url = settings.database_url or sqlite_url(settings.folder / DATABASE)
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        return url  # whoever opens it says so
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        raise ConfigError(
            f"There is no database {parsed.database}: give the coordinator's --state-dir or --database-url. [BG818]"
        )
    return url
