from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import typer

from bagua.base.disk import disk_words
from bagua.base.errors import ConfigError, UsageError
from bagua.cli.command import Connect, command
from bagua.cli.display.documents import token_document
from bagua.cli.options import Output

_SECONDS = {"h": 3_600.0, "d": 86_400.0, "w": 7 * 86_400.0}


class RoleName(StrEnum):
    """Roles that a token can have."""

    admin = "admin"
    submit = "submit"
    read = "read"
    node = "node"


@command()
def create(
    *,
    name: Annotated[str, typer.Argument(help="Name of the person or program that gets it; jobs are submitted by it.")],
    role: Annotated[
        RoleName,
        typer.Option(
            help="admin: everything. submit: jobs of a namespace. read: sees a namespace, or all. node: a daemon."
        ),
    ],
    namespace: Annotated[str, typer.Option(help="Whose jobs it sees and makes.")] = "",
    unix_user: Annotated[
        str,
        typer.Option(help="Ranks of its jobs run as this user, on nodes whose daemon has --run-as submitter."),
    ] = "",
    expires: Annotated[str, typer.Option(metavar="12h|30d|4w", help="When it ends by itself. Default: never.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write it into this new file (0600) instead of printing it.")] = None,
    output: Output,
    connect: Connect,
) -> None:
    """Makes a token and prints it. It is shown this once: the service keeps a digest."""
    lasts_s = _seconds(expires)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_new_file(out)) if out is not None else None
        client = stack.enter_context(connect())
        made = client.accounts.create(name, role.value, namespace, lasts_s, unix_user)
        if file is not None:
            file.write(made.secret + "\n")
    document = token_document(made.token)
    if out is not None:
        output.show(document, f"{out}: token {made.token.id} of {name}. Use it with --token-file {out}.")
        return
    output.show({**document, "token": made.secret}, made.secret)
    if output is Output.text:
        print(f"Token {made.token.id} of {name} is shown this once.", file=sys.stderr)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A file of this user alone, made before the token is: a token that can't be written down would be lost. It goes
    again if something fails."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"--out {path}: there is such a file already. [BG109]") from error
    except OSError as error:
        raise ConfigError(f"--out: {disk_words(error, path)} [BG109]") from error
    try:
        with os.fdopen(descriptor, "w") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _seconds(text: str) -> float:
    """``30d`` -> seconds; empty: 0. Raises UsageError."""
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d{1,6})([hdw])", text)
    if found is None or not int(found[1]):
        raise UsageError(f"--expires {text!r}: write 12h, 30d or 4w. [BG102]")
    return int(found[1]) * _SECONDS[found[2]]
