"""Options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bagua.base.errors import ConfigError

MAX_RANKS = 1024
"""On one node."""


class Output(StrEnum):
    """How a command prints."""

    text = "text"
    json = "json"


OutputOption = Annotated[Output, typer.Option("--output", help="json: one document for programs.")]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        envvar="BAGUA_COORDINATOR",
        metavar="HOST:PORT",
        help="Default: the coordinator of this state folder, else 127.0.0.1:7670.",
        show_default=False,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar="BAGUA_TOKEN_FILE", help="Default: token in the state folder.", show_default=False
    ),
]
TlsOption = Annotated[
    Path | None,
    typer.Option("--tls", envvar="BAGUA_TLS", metavar="DIR", help="Folder made by `bagua certs`.", show_default=False),
]
NnodesOption = Annotated[int, typer.Option("--nnodes", min=1, max=4096, help="Node daemons to run on.")]
NprocOption = Annotated[int, typer.Option("--nproc-per-node", min=1, max=MAX_RANKS, help="Ranks on every node.")]
MasterPortOption = Annotated[
    int,
    typer.Option(
        "--master-port",
        min=0,
        max=65535,
        help="MASTER_PORT of the ranks, for torch.distributed. Default: a free one.",
        show_default=False,
    ),
]
ModuleOption = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")]
NoPythonOption = Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program, not a Python script.")]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="K=V", help="A variable for the ranks; may be repeated.", show_default=False),
]
SecretEnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--secret-env",
        metavar="K=FILE",
        help="A variable whose value each node reads from its own FILE (mode 0600): never stored, never shown. May be "
        "repeated.",
        show_default=False,
    ),
]
AlgorithmOption = Annotated[
    str,
    typer.Option(
        "--algorithm",
        metavar="NAME[:KEY=VALUE,...]",
        help="How replicas talk, where the script does not say it itself.",
        show_default=False,
    ),
]
BaguaNetOption = Annotated[
    bool,
    typer.Option("--enable-bagua-net", help="NCCL of the ranks talks over several TCP streams (see `bagua net`)."),
]
NameOption = Annotated[str, typer.Option("--name", help="Name of the job. Default: of the script.", show_default=False)]
WorkdirOption = Annotated[
    Path | None, typer.Option("--workdir", help="Where the ranks run. Default: here.", show_default=False)
]
ScriptArgument = Annotated[str, typer.Argument(metavar="SCRIPT", help="What every rank runs.")]
ArgsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to the script untouched.", show_default=False)
]
PASS_ON = {"allow_interspersed_args": False}
"""Context settings of commands whose last argument is a script with options of its own."""


class UsageError(ConfigError):
    """An argument that can't be used: one line and exit code 2."""


def parse_env(pairs: list[str] | None) -> dict[str, str]:
    """``["A=1"]`` -> ``{"A": "1"}``. Raises UsageError for what has no name."""
    found = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UsageError(f"--env {pair!r}: write NAME=VALUE.")
        found[name] = value
    return found


def parse_secret_env(pairs: list[str] | None, variables: Collection[str]) -> dict[str, str]:
    """``["A=file"]`` -> ``{"A": "/here/file"}``: paths are absolute, and those of files on the nodes, which may have
    others than this machine. Raises UsageError for what names no file, or one of ``variables``, which have values."""
    found = {}
    for pair in pairs or []:
        name, separator, path = pair.partition("=")
        if not separator or not name or not path:
            raise UsageError(f"--secret-env {name}: write NAME=FILE.")  # not the rest: it may be the secret itself
        if name in variables:
            raise UsageError(f"{name} is given twice: with --env and with --secret-env.")
        found[name] = str(Path(path).expanduser().absolute())
    return found


def warn_of_secrets(variables: Mapping[str, str]) -> None:
    """A line on standard error for values that a service that lasts would keep in the clear."""
    from bagua.base.secrets import looks_secret

    if names := [name for name, value in variables.items() if looks_secret(name, value)]:
        kept = f"note: the coordinator's database keeps the value of {', '.join(names)}."
        print(f"{kept} --secret-env NAME=FILE keeps it out.", file=sys.stderr)


def job_env(pairs: list[str] | None, algorithm: str, enable_bagua_net: bool = False) -> dict[str, str]:
    """Variables of a job: those of --env, and what --algorithm and --enable-bagua-net say. Raises UsageError."""
    from bagua.base import algorithm_choice, net_plugin

    found = parse_env(pairs)
    if algorithm:
        try:
            found[algorithm_choice.VARIABLE] = algorithm_choice.check(algorithm)
        except ConfigError as error:
            raise UsageError(f"--algorithm {algorithm}: {error}") from error
    if enable_bagua_net:
        for name in ("NCCL_NET_PLUGIN", "NCCL_NET"):
            if name in found:
                raise UsageError(f"--enable-bagua-net sets {name} itself: leave --env {name}={found[name]} out.")
        found[net_plugin.VARIABLE] = "1"
    return found


def check_entry(script: str, module: bool, no_python: bool) -> None:
    """Refuses -m together with --no-python, and an empty name."""
    if module and no_python:
        raise UsageError("Give -m or --no-python, not both.")
    if not script.strip():
        raise UsageError("The name of the script is missing: bagua run [OPTIONS] SCRIPT [ARGS].")


def resolve_workdir(workdir: Path | None) -> Path:
    """The folder in which the ranks run, absolute. Raises UsageError if there is no such folder."""
    folder = Path(os.path.abspath(workdir or Path.cwd()))
    if not folder.is_dir():
        raise UsageError(f"--workdir {folder}: there is no such folder.")
    return folder
