"""The options of a job. Each is declared here, once.

``bagua run`` and ``bagua job submit``, their files (``--config``), ``Client.submit``, the specification that a
coordinator gets, and ``spec.run`` of a BaguaJob are made from ``JobOptions``.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypedDict

from bagua.base import algorithm_choice, checkpoint_folder, islands, net_plugin, replica_check
from bagua.base.errors import ConfigError

MAX_RANKS = 1024
"""On one node."""
MAX_NODES = 4096


@dataclass(frozen=True)
class Nodes:
    """``--nnodes``: how many, or from ``least`` to ``count``."""

    count: int
    least: int | None = None

    def __str__(self) -> str:
        return str(self.count) if self.least is None else f"{self.least}:{self.count}"


def parse_nodes(text: str) -> Nodes:
    """``"4"`` and ``"1:4"``, also as Slurm writes it, ``"1-4"``. Raises ConfigError."""
    parts = str(text).replace("-", ":").split(":")
    if len(parts) > 2 or not all(part.isdecimal() and 1 <= int(part) <= MAX_NODES for part in parts):
        raise ConfigError(f"{text!r} is neither a number from 1 to {MAX_NODES} nor a range of them, like 1:4. [BG110]")
    if len(parts) == 1:
        return Nodes(int(text))
    least, most = map(int, parts)
    if least > most:
        raise ConfigError(f"{text}: the job would need more nodes than it may have. Write {most}:{least}. [BG110]")
    return Nodes(most, least)


def _check_algorithm(text: str) -> str:
    try:
        return algorithm_choice.check(text)
    except ConfigError as error:
        raise ConfigError(f"--algorithm {text}: {error}") from error


@dataclass(frozen=True)
class Option:
    """Everything about an option. ``words`` are its help, and its description in a manifest; where they say "Default:",
    ``default`` is not shown."""

    name: str = ""
    kind: type = str  # bool, int, float, str, Path, dict or list
    words: str = ""
    default: Any = None  # None: the kind's own, False, 0 or ""
    flags: tuple[str, ...] = ()  # short ones, beside ``--name``
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    choices: type[StrEnum] | None = None
    parse: Callable[[str], Any] | None = None  # reads the text of a command line. Raises ConfigError
    commands: tuple[str, ...] = ("run", "job submit")  # commands with this option
    manifest: bool = True  # ``spec.run`` of a BaguaJob has it
    field: str = ""  # field of JobSpec, if it has another name
    variable: str = ""  # variable of the ranks' environment, if JobSpec has no field for it
    value: Callable[[Any], str] = lambda given: "1" if given is True else str(given)  # value of ``variable``
    also_sets: tuple[str, ...] = ()  # variables that follow from it: the user may not set them


def _option(**given: Any) -> Option:
    """Returns an option that ``spec.run`` of a BaguaJob lacks: the manifest has it elsewhere, or in another form."""
    return Option(manifest=False, **given)


class JobOptions(TypedDict, total=False):
    """Options of ``Client.submit`` beside the script: their types, their words, and all else that is to be known of
    them. Those that are left out have the defaults of `bagua job submit`."""

    args: Annotated[Sequence[str], "Passed on to the script untouched.", _option(default=(), commands=())]
    nnodes: Annotated[
        int,
        "Node daemons to run on. MIN:MAX: as many as there are (`bagua run` starts MAX), and the job goes on with "
        "MIN if others are lost. Default: 1.",
        _option(default=1, flags=("-N",), metavar="N|MIN:MAX", parse=parse_nodes),
    ]
    nproc_per_node: Annotated[int, "Ranks on every node.", _option(default=1, least=1, most=MAX_RANKS)]
    elastic: Annotated[bool, "The job goes on with the other ranks when ranks or nodes are lost.", _option()]
    min_nodes: Annotated[  # 0: it begins on ``nnodes``, and goes on down to one rank
        int,
        "Elastic: the fewest nodes with which the job begins and goes on.",
        _option(least=1, most=MAX_NODES, commands=("job submit",)),
    ]
    max_nodes: Annotated[  # 0: ``nnodes``
        int,
        "Elastic: the most nodes to which the job grows.",
        _option(least=1, most=MAX_NODES, commands=("job submit",)),
    ]
    respawn: Annotated[
        int,
        "Elastic: lost ranks that each node replaces in an hour, if the script takes newcomers.",
        _option(metavar="N", least=0, most=1000),
    ]
    island_size: Annotated[
        int,
        "Ranks that hold one copy of a sharded model together; torch.distributed's world is theirs. Default: 1.",
        Option(least=0, most=MAX_RANKS, variable=islands.VARIABLE),
    ]
    module: Annotated[bool, "SCRIPT is a module, as in python -m.", _option(flags=("-m",), field="is_module")]
    no_python: Annotated[bool, "SCRIPT is a program, not a Python script.", _option()]
    master_port: Annotated[
        int, "MASTER_PORT of the ranks, for torch.distributed. Default: a free one.", Option(least=0, most=65535)
    ]
    algorithm: Annotated[
        str,
        "How replicas talk, where the script does not say it itself.",
        Option(metavar="NAME[:KEY=VALUE,...]", variable=algorithm_choice.VARIABLE, value=_check_algorithm),
    ]
    checkpoint_dir: Annotated[
        str | os.PathLike[str] | None,
        "Where bagua.checkpoint.Checkpointer() of the script writes, and finds checkpoints of an earlier run.",
        Option(
            metavar="FOLDER",
            variable=checkpoint_folder.VARIABLE,
            value=lambda folder: checkpoint_folder.absolute(Path(folder)),
        ),
    ]
    enable_bagua_net: Annotated[
        bool,
        "NCCL of the ranks talks over several TCP streams (see `bagua net`).",
        Option(variable=net_plugin.VARIABLE, also_sets=("NCCL_NET_PLUGIN", "NCCL_NET")),
    ]
    autotune: Annotated[
        bool,
        "The job tries settings of the exchange while it trains, and keeps the best.",
        Option(variable="BAGUA_AUTOTUNE"),
    ]
    check_replicas: Annotated[
        str,
        "Answer to replicas that differ: warn, error (the job ends) or off (they are not compared). Default: warn.",
        Option(
            choices=replica_check.CheckReplicas,
            variable=replica_check.VARIABLE,
            value=lambda word: replica_check.parse(word, "check_replicas"),
        ),
    ]
    env: Annotated[Mapping[str, str] | None, "A variable for the ranks; may be repeated.", _option(metavar="K=V")]
    secret_env: Annotated[
        Mapping[str, str | os.PathLike[str]] | None,
        "A variable whose value each node reads from its own FILE (mode 0600): never stored, never shown. May be "
        "repeated.",
        _option(metavar="K=FILE"),
    ]
    name: Annotated[str, "Name of the job. Default: of the script.", _option()]
    # A folder that the nodes have. With a working directory that is shipped: below its root.
    workdir: Annotated[str | os.PathLike[str] | None, "Where the ranks run. Default: here.", _option()]
    python: Annotated[str, "Interpreter of the ranks. Default: the daemon's.", Option(commands=("job submit",))]
    placement_timeout_s: Annotated[
        float,
        "Seconds to wait for free nodes; 0: fail at once. Default: 30 days.",
        _option(default=30 * 86_400.0, least=0.0, commands=("job submit",)),
    ]
    stop_grace_s: Annotated[
        float,
        "Seconds between SIGTERM and SIGKILL of ranks.",
        _option(default=10.0, least=0.0, commands=("job submit",)),
    ]


def _kind(hint: Any) -> type:
    if hint in (bool, int, float, str):
        return hint  # type: ignore[no-any-return]
    return dict if "Mapping" in str(hint) else Path if "PathLike" in str(hint) else list


def _declared() -> Iterator[Option]:
    for name, hint in typing.get_type_hints(JobOptions, include_extras=True).items():
        words, *more = hint.__metadata__
        kind, option = _kind(hint.__origin__), more[0] if more else Option()
        zero = kind() if kind in (bool, int, float, str) else None
        default = zero if option.default is None else option.default
        yield replace(option, name=name, kind=kind, words=words, default=default)


# All options by name, in the order in which help shows them.
OPTIONS = {option.name: option for option in _declared()}


def default_name(entry: str, module: bool) -> str:
    """``train.py`` -> ``train``; a module ``bagua.examples.digits`` -> ``digits``."""
    return entry.rpartition(".")[2] if module else Path(entry).stem


def variables(job: JobOptions) -> dict[str, str]:
    """The variables of the ranks: ``env``, and those that other options set. Raises ConfigError."""
    found = dict(job.get("env") or {})
    for name, text in found.items():
        if not (isinstance(name, str) and isinstance(text, str)):  # protobuf's words would name neither
            raise ConfigError(f"env: {name!r} is {text!r}: names and values must be texts. [BG107]")
    given = dict(found)
    for one in OPTIONS.values():
        value: Any = job.get(one.name)
        if not one.variable or value in (None, False, ""):  # an option that was not given leaves the variable alone
            continue
        for name in one.also_sets:
            if name in given:
                flag = f"--{one.name.replace('_', '-')}"
                raise ConfigError(f"{flag} sets {name} itself: leave --env {name}={given[name]} out. [BG107]")
        found[one.variable] = one.value(value)
    return found
