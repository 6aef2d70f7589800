"""Makes the specification of a job out of typed arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from bagua.base import algorithm_choice, checkpoint_folder, net_plugin, replica_check
from bagua.base.errors import ConfigError
from bagua.proto import common_pb2

PLACEMENT_TIMEOUT_S = 300.0
STOP_GRACE_S = 10.0


class JobArguments(TypedDict, total=False):
    """Arguments of ``job_spec`` beside the script. Those that are left out have the defaults of `bagua job submit`."""

    args: Sequence[str]
    """Passed on to the script."""
    module: bool
    """``script`` is a module, as in python -m."""
    no_python: bool
    """``script`` is a program."""
    name: str
    """Empty: that of the script."""
    nnodes: int
    nproc_per_node: int
    elastic: bool
    min_nodes: int
    """Of an elastic job. 0: it begins on ``nnodes``, and goes on down to one rank."""
    max_nodes: int
    """Of an elastic job. 0: ``nnodes``."""
    respawn: int
    """Of an elastic job: lost ranks that are replaced on each node, an hour."""
    env: Mapping[str, str]
    secret_env: Mapping[str, str | os.PathLike[str]]
    """Name -> absolute path of a file that each node has."""
    workdir: str | os.PathLike[str]
    """A folder that the nodes have. Default: this process's. With a ``working_dir`` that is shipped: below its root."""
    python: str
    """Interpreter of the ranks. Empty: the daemon's."""
    algorithm: str
    """``NAME[:key=value,…]``, where the script does not choose one."""
    checkpoint_dir: str | os.PathLike[str]
    autotune: bool
    check_replicas: str
    """``warn``, ``error`` or ``off``: what follows where replicas differ. Empty: a warning."""
    enable_bagua_net: bool
    master_port: int
    """0: a free one."""
    placement_timeout_s: float
    """Seconds to wait for free nodes. 0: the job fails at once."""
    stop_grace_s: float
    """Seconds between SIGTERM and SIGKILL of ranks."""


def job_spec(
    script: str | os.PathLike[str],
    *,
    args: Sequence[str] = (),
    module: bool = False,
    no_python: bool = False,
    name: str = "",
    nnodes: int = 1,
    nproc_per_node: int = 1,
    elastic: bool = False,
    min_nodes: int = 0,
    max_nodes: int = 0,
    respawn: int = 0,
    env: Mapping[str, str] | None = None,
    secret_env: Mapping[str, str | os.PathLike[str]] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    python: str = "",
    algorithm: str = "",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    autotune: bool = False,
    check_replicas: str = "",
    enable_bagua_net: bool = False,
    master_port: int = 0,
    placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
    stop_grace_s: float = STOP_GRACE_S,
    shipped: bool = False,
) -> common_pb2.JobSpec:
    """The specification; ``JobArguments`` says what arguments mean. ``shipped``: the job has a working directory that
    is shipped. Raises ConfigError with words for what contradicts itself. The coordinator checks the rest."""
    entry = os.fspath(script)
    if not entry.strip():
        raise ConfigError("The name of the script is missing. [BG104]")
    if module and no_python:
        raise ConfigError("A script is a module or a program, not both: give module=True or no_python=True. [BG103]")
    if isinstance(args, str):
        raise ConfigError(f"args is the text {args!r}: pass a list of texts. [BG103]")
    if (respawn or min_nodes or max_nodes) and not elastic:
        raise ConfigError("respawn, min_nodes and max_nodes are for elastic jobs: pass elastic=True, too. [BG110]")
    for label, number in (("nnodes", nnodes), ("nproc_per_node", nproc_per_node)):
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"{label} is {number!r}: it must be a whole number from 1. [BG110]")
    default_folder = "" if shipped else Path.cwd()
    folder = Path(default_folder if workdir is None else workdir).expanduser()
    return common_pb2.JobSpec(
        name=name or default_name(entry, module),
        entry=entry,
        is_module=module,
        no_python=no_python,
        args=[str(one) for one in args],
        env=variables(env or {}, algorithm, enable_bagua_net, checkpoint_dir, autotune, check_replicas),
        secret_env={key: os.fspath(path) for key, path in (secret_env or {}).items()},
        workdir=("" if str(folder) == "." else str(folder)) if shipped else str(folder.absolute()),
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        elastic=elastic,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        respawn=respawn,
        python=python,
        master_port=master_port,
        placement_timeout_s=placement_timeout_s,
        stop_grace_s=stop_grace_s,
    )


def default_name(entry: str, module: bool) -> str:
    """``train.py`` -> ``train``; a module ``bagua.examples.digits`` -> ``digits``."""
    return entry.rpartition(".")[2] if module else Path(entry).stem


def variables(
    env: Mapping[str, str],
    algorithm: str = "",
    enable_bagua_net: bool = False,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    autotune: bool = False,
    check_replicas: str = "",
) -> dict[str, str]:
    """Variables of a job: ``env``, and what the others say. Raises ConfigError."""
    for name, value in env.items():
        if not (isinstance(name, str) and isinstance(value, str)):  # protobuf's words would name neither
            raise ConfigError(f"env: {name!r} is {value!r}: names and values must be texts. [BG107]")
    found = dict(env)
    if algorithm:
        try:
            found[algorithm_choice.VARIABLE] = algorithm_choice.check(algorithm)
        except ConfigError as error:
            raise ConfigError(f"--algorithm {algorithm}: {error}") from error
    if autotune:
        found["BAGUA_AUTOTUNE"] = "1"
    if check_replicas:
        found[replica_check.VARIABLE] = replica_check.parse(check_replicas, "check_replicas")
    if enable_bagua_net:
        for name in ("NCCL_NET_PLUGIN", "NCCL_NET"):
            if name in found:
                raise ConfigError(
                    f"--enable-bagua-net sets {name} itself: leave --env {name}={found[name]} out. [BG107]"
                )
        found[net_plugin.VARIABLE] = "1"
    if checkpoint_dir is not None:
        found[checkpoint_folder.VARIABLE] = checkpoint_folder.absolute(Path(checkpoint_dir))
    return found
