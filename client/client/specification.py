"""Makes the specification of a job out of its options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from bagua.base import islands
from bagua.base.errors import ConfigError
from bagua.base.job_options import OPTIONS, JobOptions, default_name, variables
from bagua.proto import common_pb2

_DEFAULTS = {name: one.default for name, one in OPTIONS.items()}
# Fields that have the value of an option as it is.
_PLAIN = {
    field: name
    for name, one in OPTIONS.items()
    if (field := one.field or name) in common_pb2.JobSpec.DESCRIPTOR.fields_by_name
    and one.kind in (bool, int, float, str)
}


def job_spec(
    script: str | os.PathLike[str], *, shipped: bool = False, **options: Unpack[JobOptions]
) -> common_pb2.JobSpec:
    """The specification; ``JobOptions`` says what options mean. ``shipped``: the job has a working directory that is
    shipped. Raises ConfigError with words for what contradicts itself. The coordinator checks the rest."""
    if unknown := [name for name in options if name not in OPTIONS]:
        raise TypeError(f"{unknown[0]!r} is no option of a job: bagua.client.JobOptions lists all. [BG812]")
    entry = os.fspath(script)
    given = {name: value for name, value in options.items() if value is not None}
    job: JobOptions = {**_DEFAULTS, **given}  # type: ignore[typeddict-item]
    env = variables(job)
    _check(entry, job, env)
    default_folder = "" if shipped else Path.cwd()
    workdir = job["workdir"]
    folder = Path(default_folder if workdir is None else workdir).expanduser()
    spec = common_pb2.JobSpec(
        entry=entry,
        args=[str(one) for one in job["args"]],
        env=env,
        secret_env={key: os.fspath(path) for key, path in (job["secret_env"] or {}).items()},
        workdir=("" if str(folder) == "." else str(folder)) if shipped else str(folder.absolute()),
    )
    for field, name in _PLAIN.items():
        setattr(spec, field, job[name])  # type: ignore[literal-required]
    spec.name = spec.name or default_name(entry, spec.is_module)
    return spec


def _check(entry: str, job: JobOptions, env: Mapping[str, str]) -> None:
    if not entry.strip():
        raise ConfigError("The name of the script is missing. [BG104]")
    if job["module"] and job["no_python"]:
        raise ConfigError("A script is a module or a program, not both: give module=True or no_python=True. [BG103]")
    if isinstance(job["args"], str):  # a list of its letters would be taken
        raise ConfigError(f"args is the text {job['args']!r}: pass a list of texts. [BG103]")
    if (job["respawn"] or job["min_nodes"] or job["max_nodes"]) and not job["elastic"]:
        raise ConfigError("respawn, min_nodes and max_nodes are for elastic jobs: pass elastic=True, too. [BG110]")
    for label, number in (("nnodes", job["nnodes"]), ("nproc_per_node", job["nproc_per_node"])):
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"{label} is {number!r}: it must be a whole number from 1. [BG110]")
    if islands.VARIABLE in (job["secret_env"] or {}):
        raise ConfigError(f"{islands.VARIABLE} is no secret: give --island-size. [BG114]")
    # Here, too: before daemons are started or files are sent.
    islands.check(
        islands.size_in(env),
        nodes=job["nnodes"],
        ranks=job["nproc_per_node"],
        elastic=job["elastic"],
        respawn=job["respawn"],
    )
