"""Options that several commands share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagua.base.errors import ConfigError, UsageError
from bagua.base.replica_check import CheckReplicas

if TYPE_CHECKING:
    from bagua.client import Packed

MAX_RANKS = 1024
"""On one node."""
MAX_NODES = 4096
MAX_RANK = (1 << 32) - 1


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


@dataclass(frozen=True)
class Nodes:
    """``--nnodes``: how many, or from ``least`` to ``count``."""

    count: int
    least: int | None = None

    def __str__(self) -> str:
        return str(self.count) if self.least is None else f"{self.least}:{self.count}"


def parse_nodes(text: str) -> Nodes:
    """``"4"`` and ``"1:4"``, also as Slurm writes it, ``"1-4"``. Raises typer.BadParameter."""
    parts = str(text).replace("-", ":").split(":")
    if len(parts) > 2 or not all(part.isdecimal() and 1 <= int(part) <= MAX_NODES for part in parts):
        raise typer.BadParameter(
            f"{text!r} is neither a number from 1 to {MAX_NODES} nor a range of them, like 1:4. [BG110]"
        )
    if len(parts) == 1:
        return Nodes(int(text))
    least, most = map(int, parts)
    if least > most:
        raise typer.BadParameter(
            f"{text}: the job would need more nodes than it may have. Write {most}:{least}. [BG110]"
        )
    return Nodes(most, least)


NnodesOption = Annotated[
    Nodes | None,
    typer.Option(
        "--nnodes",
        "-N",
        parser=parse_nodes,
        metavar="N|MIN:MAX",
        help="Node daemons to run on. MIN:MAX: as many as there are (`bagua run` starts MAX), and the job goes on with "
        "MIN if others are lost. Default: 1.",
        show_default=False,
    ),
]
ElasticOption = Annotated[
    bool,
    typer.Option("--elastic", help="Ranks and nodes that are lost end the job no more: the others go on."),
]
TAKES_NEWCOMERS = re.compile(r"\bElasticSampler\b|\bwait_to_join\b")
"""In scripts that newcomers of an elastic job may join."""
RespawnOption = Annotated[
    int,
    typer.Option(
        "--respawn",
        min=0,
        max=1000,
        metavar="N",
        help="Elastic: so many lost ranks an hour are replaced on each node, if the script takes newcomers.",
    ),
]
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
SecretOption = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="K=FILE",
        help="A variable whose value is read from FILE here (mode 0600). The coordinator keeps it in memory alone: if "
        "it is started again before the ranks are, the job fails. May be repeated.",
        show_default=False,
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", help="Where the job goes. Default: your account's.", show_default=False)
]
AsUserOption = Annotated[
    str,
    typer.Option(
        "--as-user",
        help="Unix user of the ranks, on nodes whose daemon has --run-as submitter. Default: your account's; another "
        "one is for administrators.",
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
CheckpointDirOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint-dir",
        metavar="FOLDER",
        help="Where bagua.checkpoint.Checkpointer() of the script writes, and finds checkpoints of an earlier run.",
        show_default=False,
    ),
]
AutotuneOption = Annotated[
    bool,
    typer.Option("--autotune", help="The job tries settings of the exchange while it trains, and keeps the best."),
]
CheckReplicasOption = Annotated[
    CheckReplicas | None,
    typer.Option(
        "--check-replicas",
        help="Where replicas have drifted apart: a warning, or the end of the job; off: nobody looks. Default: warn.",
        show_default=False,
    ),
]
BaguaNetOption = Annotated[
    bool,
    typer.Option("--enable-bagua-net", help="NCCL of the ranks talks over several TCP streams (see `bagua net`)."),
]
HostsOption = Annotated[
    str,
    typer.Option(
        "--hosts",
        metavar="HOST,USER@HOST:PORT",
        help="Run on these hosts: a node daemon on each, started by ssh. They have this Python environment and the "
        "folder at the same paths.",
        show_default=False,
    ),
]
SshOption = Annotated[
    str,
    typer.Option(
        "--ssh",
        metavar="COMMAND",
        help='With --hosts: the ssh client, such as "ssh -F my.config". Default: BAGUA_SSH, else ssh.',
        show_default=False,
    ),
]
AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="With several hosts: by which address of this machine the others reach it. Default: found out.",
        show_default=False,
    ),
]
RequeueOption = Annotated[
    bool,
    typer.Option(
        "--requeue", help="With `bagua slurm run`: SIGUSR1, the sign of the time limit, queues the job again."
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
        show_default=False,
    ),
]
PrefixOption = Annotated[
    bool | None,
    typer.Option(
        "--prefix/--no-prefix",
        help="Begin each line of output with its rank, as in \\[rank 3]. Default: where there are several ranks.",
        show_default=False,
    ),
]
NameOption = Annotated[str, typer.Option("--name", help="Name of the job. Default: of the script.", show_default=False)]
WorkdirOption = Annotated[
    Path | None, typer.Option("--workdir", help="Where the ranks run. Default: here.", show_default=False)
]
WorkingDirOption = Annotated[
    Path | None,
    typer.Option(
        "--working-dir",
        metavar="DIR",
        help="Ship the files of this folder to the nodes: ranks run in a copy of it. SCRIPT is a path in it. What git "
        "ignores stays here, and those that DIR/.baguaignore names.",
        show_default=False,
    ),
]
ScriptArgument = Annotated[str, typer.Argument(metavar="SCRIPT", help="What every rank runs.")]
ArgsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Passed on to the script untouched.", show_default=False)
]
PASS_ON = {"allow_interspersed_args": False}
"""Context settings of commands whose last argument is a script with options of its own."""


@dataclass(frozen=True)
class Shown:
    """Which output of ranks is shown: of ``ranks`` (none: all), with their ``prefix`` (None: where there are several
    ranks)."""

    ranks: tuple[int, ...] = ()
    prefix: bool | None = None

    def shows(self, rank: int) -> bool:
        """Whether this rank's output is."""
        return not self.ranks or rank in self.ranks

    def begin(self, rank: int, several: bool) -> str:
        """The beginning of its lines."""
        return f"[rank {rank}] " if (several if self.prefix is None else self.prefix) else ""


ALL_SHOWN = Shown()


def shown(only: list[int] | None, prefix: bool | None, ranks: int, elastic: bool = False) -> Shown:
    """``--only-rank`` and ``--prefix``, for a job of so many ranks. Raises UsageError for a rank that it does not
    have; an elastic job may get more."""
    if (missing := [rank for rank in only or () if rank >= ranks]) and not elastic:
        raise UsageError(f"--only-rank {missing[0]}: the job has ranks 0 to {ranks - 1}. [BG102]")
    return Shown(tuple(only or ()), prefix)


def parse_env(pairs: list[str] | None) -> dict[str, str]:
    """``["A=1"]`` -> ``{"A": "1"}``. Raises UsageError for what has no name."""
    found = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UsageError(f"--env {pair!r}: write NAME=VALUE. [BG107]")
        found[name] = value
    return found


def parse_secret_env(pairs: list[str] | None, variables: Collection[str]) -> dict[str, str]:
    """``["A=file"]`` -> ``{"A": "/here/file"}``: paths are absolute, and those of files on the nodes, which may have
    others than this machine. Raises UsageError for what names no file, or one of ``variables``, which have values."""
    found = {}
    for pair in pairs or []:
        name, separator, path = pair.partition("=")
        if not separator or not name or not path:
            raise UsageError(
                f"--secret-env {name}: write NAME=FILE. [BG107]"
            )  # not the rest: it may be the secret itself
        if name in variables:
            raise UsageError(f"{name} is given twice: with --env and with --secret-env. [BG107]")
        found[name] = str(Path(path).expanduser().absolute())
    return found


def read_secrets(pairs: list[str] | None, taken: Collection[str]) -> dict[str, str]:
    """``["A=file"]`` -> ``{"A": what the file has}``; a line's end behind it is no part of it. Raises UsageError for
    what names no file, or one of the ``taken`` variables; ConfigError for a file that others may read, or that can't
    be."""
    from bagua.base.secrets import read_private

    found = {}
    for pair in pairs or []:
        name, separator, path = pair.partition("=")
        if not separator or not name or not path:
            raise UsageError(f"--secret {name}: write NAME=FILE. [BG107]")  # not the rest: it may be the secret itself
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


def job_env(
    pairs: list[str] | None,
    algorithm: str,
    enable_bagua_net: bool = False,
    checkpoint_dir: Path | None = None,
    autotune: bool = False,
    check_replicas: str | None = None,
) -> dict[str, str]:
    """Variables of a job: those of --env, and what --algorithm, --enable-bagua-net, --checkpoint-dir, --autotune and
    --check-replicas say. Raises UsageError."""
    from bagua.client.specification import variables

    env = parse_env(pairs)
    try:
        return variables(env, algorithm, enable_bagua_net, checkpoint_dir, autotune, check_replicas or "")
    except ConfigError as error:
        raise UsageError(str(error)) from error


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

    try:
        packed = pack(folder)
        if is_script:
            packed.check_entry(folder, script)
    except ConfigError as error:
        raise UsageError(str(error)) from error
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


def spec_nodes(
    nodes: Nodes | None,
    elastic: bool,
    min_nodes: int | None = None,
    max_nodes: int | None = None,
    respawn: int = 0,
) -> dict[str, Any]:
    """The fields of a JobSpec that say on how many nodes a job runs, whether it goes on with fewer, and how many lost
    ranks are replaced. Raises UsageError for what contradicts itself."""
    found = _spec_nodes(nodes, elastic, min_nodes, max_nodes)
    if respawn and not found["elastic"]:
        raise UsageError("--respawn needs --elastic: without it the job ends with the first rank that is lost. [BG110]")
    return {**found, "respawn": respawn} if respawn else found


def _spec_nodes(nodes: Nodes | None, elastic: bool, min_nodes: int | None, max_nodes: int | None) -> dict[str, Any]:
    if nodes is not None and nodes.least is not None:
        if min_nodes or max_nodes:
            raise UsageError("--nnodes MIN:MAX says it already: leave --min-nodes and --max-nodes out. [BG110]")
        return {"nnodes": nodes.count, "elastic": True, "min_nodes": nodes.least}
    if not (min_nodes or max_nodes):
        return {"nnodes": nodes.count if nodes else 1, "elastic": elastic}
    count = nodes.count if nodes else max_nodes or min_nodes or 1
    least, most = min_nodes or 1, max_nodes or count
    if least > most:
        raise UsageError(f"--min-nodes {least} is more than the {most} nodes that the job may have. [BG110]")
    if not least <= count <= most:
        raise UsageError(f"--nnodes {count} is not from {least} to {most}, as --min-nodes and --max-nodes say. [BG110]")
    return {"nnodes": count, "elastic": True, "min_nodes": least, "max_nodes": most}


def check_entry(script: str, module: bool, no_python: bool) -> None:
    """Refuses -m together with --no-python, and an empty name."""
    if module and no_python:
        raise UsageError("Give -m or --no-python, not both. [BG103]")
    if not script.strip():
        raise UsageError("The name of the script is missing: bagua run [OPTIONS] SCRIPT [ARGS]. [BG104]")


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
