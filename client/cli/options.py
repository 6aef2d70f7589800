"""Options that several commands share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from bagua.base.errors import ConfigError, UsageError
from bagua.base.text import json_text

if TYPE_CHECKING:
    from bagua.client import Packed

MAX_RANK = (1 << 32) - 1
P = ParamSpec("P")
T = TypeVar("T")


class Output(StrEnum):
    """Form in which a command prints."""

    text = "text"
    json = "json"

    def show(self, document: Any, text: str | Callable[[], None] = "") -> None:
        """Prints the document as JSON, or else ``text``, which may be a function that prints."""
        if self is Output.json:
            print(json_text(document), flush=True)
        elif callable(text):
            text()
        elif text:
            print(text, flush=True)


OutputOption = Annotated[Output, typer.Option("--output", help="json: one document for programs.")]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        envvar="BAGUA_COORDINATOR",
        metavar="HOST:PORT",
        help="Default: the coordinator of this state folder, else 127.0.0.1:7670.",
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="BAGUA_TOKEN_FILE", help="Default: token in the state folder."),
]
TlsOption = Annotated[
    Path | None,
    typer.Option("--tls", envvar="BAGUA_TLS", metavar="DIR", help="Folder made by `bagua certs`."),
]


# In scripts that newcomers of an elastic job may join.
TAKES_NEWCOMERS = re.compile(r"\bElasticSampler\b|\bwait_to_join\b")
SecretOption = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="K=FILE",
        help="A variable whose value is read from FILE here (mode 0600). The coordinator keeps it in memory alone: if "
        "it is started again before the ranks are, the job fails. May be repeated.",
    ),
]
OnlyRankOption = Annotated[
    list[int] | None,
    typer.Option(
        "--only-rank",
        min=0,
        max=MAX_RANK,
        metavar="R",
        help="Show the output of this rank alone; may be repeated. Logs have all of them.",
    ),
]
PrefixOption = Annotated[
    bool | None,
    typer.Option(
        "--prefix/--no-prefix",
        help="Begin each line of output with its rank, as in \\[rank 3]. Default: where there are several ranks.",
    ),
]
WorkingDirOption = Annotated[
    Path | None,
    typer.Option(
        "--working-dir",
        metavar="DIR",
        help="Ship the files of this folder to the nodes: ranks run in a copy of it. SCRIPT is a path in it. What git "
        "ignores stays here, and those that DIR/.baguaignore names.",
    ),
]
ScriptArgument = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script that every rank runs.")]
ArgsArgument = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to the script untouched.")]
# Settings of commands whose last argument is a script with options of its own.
TAKES_SCRIPT: dict[str, Any] = {"context_settings": {"allow_interspersed_args": False}, "no_args_is_help": True}
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id, or the beginning of it.")]
NodeId = Annotated[str, typer.Argument(metavar="NODE", help="The node's id, as `bagua node list` shows it.")]


def checked(parse: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """``parse(*arguments)``; what it refuses becomes a UsageError."""
    try:
        return parse(*arguments, **options)
    except ConfigError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Shown:
    """Choice of the ranks' output that is shown: of ``ranks`` (none: all), with their ``prefix`` (None: if there are
    several ranks).
    """

    ranks: tuple[int, ...] = ()
    prefix: bool | None = None

    def shows(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks

    def line_prefix(self, rank: int, several: bool) -> str:
        return f"[rank {rank}] " if (several if self.prefix is None else self.prefix) else ""


ALL_SHOWN = Shown()


def shown(only: list[int] | None, prefix: bool | None, ranks: int, elastic: bool = False) -> Shown:
    """``--only-rank`` and ``--prefix``, for a job of so many ranks. Raises UsageError for a rank that it does not
    have; an elastic job may get more."""
    if (missing := [rank for rank in only or () if rank >= ranks]) and not elastic:
        raise UsageError(f"--only-rank {missing[0]}: the job has ranks 0 to {ranks - 1}. [BG102]")
    return Shown(tuple(only or ()), prefix)


def named_files(option: str, pairs: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """``["A=file"]`` of an option -> (A, file). Raises UsageError for what names no file, without the rest: it may be
    the secret itself."""
    for pair in pairs or ():
        name, _, path = pair.partition("=")
        if not name or not path:
            raise UsageError(f"{option} {name}: write NAME=FILE. [BG107]")
        yield name, path


def read_secrets(pairs: list[str] | None, taken: Collection[str]) -> dict[str, str]:
    """``["A=file"]`` -> ``{"A": what the file has}``; a line's end behind it is no part of it. Raises UsageError for
    what names no file, or one of the ``taken`` variables; ConfigError for a file that others may read, or that can't
    be."""
    from bagua.base.secrets import read_private

    found: dict[str, str] = {}
    for name, path in named_files("--secret", pairs):
        if name in taken or name in found:
            raise UsageError(f"{name} is given twice. [BG107]")
        try:
            text = read_private(Path(path).expanduser(), f"--secret {name}: the file").decode()
        except OSError as error:
            raise ConfigError(f"--secret {name}: the file {path} can't be read: {error.strerror}. [BG109]") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--secret {name}: the file {path} is not UTF-8 text. [BG109]") from error
        found[name] = text.removesuffix("\n").removesuffix("\r")
    return found


def warn_of_secrets(variables: Mapping[str, str]) -> None:
    """A line on standard error for values that a service that lasts would keep in the clear."""
    from bagua.base.secrets import looks_secret

    if names := [name for name, value in variables.items() if looks_secret(name, value)]:
        kept = f"note: the coordinator's database keeps the value of {', '.join(names)}."
        print(f"{kept} --secret NAME=FILE or --secret-env NAME=FILE keeps it out.", file=sys.stderr)


def pack_code(folder: Path | None, workdir: Path | None, script: str, is_script: bool) -> Packed | None:
    """The files of ``--working-dir``, if that is given. Raises UsageError: with --workdir, for a folder that can't be
    shipped, or without the script."""
    if folder is None:
        return None
    if workdir is not None:
        raise UsageError(
            "Give --working-dir, a folder here that is shipped, or --workdir, one on the nodes; not both. [BG103]"
        )
    from bagua.client import pack

    packed = checked(pack, folder)
    if is_script:
        checked(packed.check_entry, folder, script)
    return packed


def warn_of_newcomers(script: Path, respawn: int) -> None:
    """Says so where ``respawn`` is wanted, and the script does not look as if newcomers could join it."""
    try:
        text = script.read_text(errors="replace") if respawn else ""
    except OSError:
        return  # of another machine
    if text and not TAKES_NEWCOMERS.search(text):
        print(
            f"--respawn: {script} has neither an ElasticSampler nor wait_to_join(). If nothing that it imports has "
            "one, nobody takes the place of lost ranks. Let it take newcomers: for epoch in "
            "bagua.contrib.ElasticSampler(dataset, batch_size=32).epochs(10) (docs/elastic.md#a-script).",
            file=sys.stderr,
        )


def resolve_workdir(workdir: Path | None) -> Path:
    """The folder in which the ranks run, absolute. Raises UsageError if there is no such folder."""
    folder = Path(os.path.abspath(workdir or Path.cwd()))
    if not folder.is_dir():
        raise UsageError(f"--workdir {folder}: there is no such folder. [BG104]")
    return folder


def check_new_file(path: Path) -> None:
    """Raises ConfigError if ``path`` can't be written: before the work whose result goes there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path} can't be written: there is no folder {folder}. [BG109]")
    if path.is_dir():
        raise ConfigError(f"{path} can't be written: it is a folder. Name a file. [BG109]")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} can't be written: user {os.getuid()} may not make files in {folder}. [BG109]")
