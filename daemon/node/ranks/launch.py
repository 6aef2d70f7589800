"""Builds the command and the environment of a rank, and checks them first. It starts no process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from bagua.base import islands, malloc, net_plugin
from bagua.base.errors import ConfigError
from bagua.base.secrets import read_private
from bagua.daemon.node.rules.job_specification import JobSpecification, Program

_DEFAULTS = {
    "PYTHONUNBUFFERED": "1",  # into a pipe Python writes by blocks: logs would lag
    "PYTHONFAULTHANDLER": "1",  # a crash by a signal says where it was
    "PYTHONBREAKPOINT": "bagua.base.debugging.stop",
}


class LaunchError(RuntimeError):
    """The program of a job can't be started on this node; the message names the path and what is wrong with it."""


def command(program: Program) -> list[str]:
    """The command line of every rank."""
    if program.no_python:
        return [program.entry, *program.args]
    python = program.python or sys.executable
    if program.is_module:
        return [python, "-m", program.entry, *program.args]
    return [python, program.entry, *program.args]


def work_folder(program: Program) -> Path:
    """Returns the folder in which ranks run: the job's, else the daemon's own."""
    try:
        return Path(program.workdir) if program.workdir else Path.cwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory of the node daemon is gone: name one with --workdir, or restart the daemon [BG903]"
        ) from None


def environment(
    spec: JobSpecification,
    member: int,
    *,
    base: Mapping[str, str],
    secrets: Mapping[str, str],
    rank_socket: Path,
    cache: Path | None,
    plugin: Path | None = None,
) -> dict[str, str]:
    """Variables of ``member``: those that the daemon passes on (``base``), then the job's, those of its secrets
    included, then those that say who it is, and those that lead NCCL to ``plugin``. ``cache``: of native code; None:
    the user's own. RANK is the member number: in the
    first generation the rank. Raises ConfigError for a plugin that no variable can lead to."""
    place = spec.place(member)
    # The service may run with PYTHONSAFEPATH=1 (its images do), but a user's script imports what lies beside it.
    inherited = {key: value for key, value in base.items() if key != "PYTHONSAFEPATH"}
    memory = {variable: str(value) for _, variable, value in malloc.thresholds(spec.program.env)}
    env = {**_DEFAULTS, **memory, **inherited, **spec.program.env, **secrets}
    if islands.VARIABLE not in spec.program.env:  # one of the daemon's own: the coordinator would not know of islands
        env.pop(islands.VARIABLE, None)
    if place.local_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: else each rank takes a thread per core
    env.update(
        RANK=str(member),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        NODE_RANK=str(place.host_index),
        GROUP_RANK=str(place.host_index),
        MASTER_ADDR=spec.master_addr,
        MASTER_PORT=str(spec.master_port),
        BAGUA_JOB_ID=spec.job_id,
        BAGUA_DAEMON_SOCKET=str(rank_socket),
    )
    if cache is not None:
        env.setdefault("BAGUA_CACHE_DIR", str(cache))
    if plugin is not None:
        env.update(net_plugin.variables(plugin, env))
    return env


def read_secrets(program: Program, node_id: str) -> dict[str, str]:
    """The job's secret variables, from their files on this node; a line's end behind a value is no part of it. They
    are kept in memory alone. Raises LaunchError that names variable and file, never the content."""
    found = {}
    for name, path in program.secret_env.items():
        title = f"--secret-env {name}: the file"
        try:
            value = read_private(Path(path), title).decode()
        except ConfigError as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
            raise LaunchError(
                f"{title} {path} can't be read on node {node_id}: {error.strerror}. Every node of the job needs it. "
                "[BG905]"
            ) from error
        except UnicodeDecodeError as error:
            raise LaunchError(f"{title} {path} is not UTF-8 text. [BG905]") from error
        value = value.removesuffix("\n").removesuffix("\r")
        if "\0" in value:
            raise LaunchError(f"{title} {path} contains a zero byte. [BG905]")
        found[name] = value
    return found


def check_program(program: Program, base: Mapping[str, str]) -> None:
    """Raises LaunchError if the folder, the script or the program is not there: asked before a build."""
    folder = work_folder(program)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise LaunchError(f"the working directory {folder} {what} [BG903]")
    executable = command(program)[0]
    if not program.no_python and not program.is_module:
        _check_script(folder / program.entry)
    _check_executable(executable, folder, {**base, **program.env}.get("PATH", os.defpath))


def _check_script(script: Path) -> None:
    if script.is_dir():
        if (script / "__main__.py").is_file():
            return
        raise LaunchError(f"the script {script} is a folder without a __main__.py [BG903]")
    if not script.exists():
        raise LaunchError(f"the script {script} does not exist [BG903]")
    if not os.access(script, os.R_OK):
        raise LaunchError(f"the script {script} can't be read: permission denied [BG903]")


def _check_executable(name: str, folder: Path, path: str) -> None:
    if "/" not in name:
        if shutil.which(name, path=path) is None:
            raise LaunchError(f"the program {name} is not in PATH ({path}) [BG903]")
        return
    program = folder / name
    if not program.exists():
        raise LaunchError(f"the program {program} does not exist [BG903]")
    if program.is_dir() or not os.access(program, os.X_OK):
        raise LaunchError(f"the program {program} is not executable [BG903]")
