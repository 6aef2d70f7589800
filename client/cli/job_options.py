"""The options of a job on the command line: typer's form of ``bagua.base.job_options``, and the way back to a
specification."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from bagua.base.errors import ConfigError, UsageError
from bagua.base.job_options import OPTIONS, JobOptions, Nodes, Option
from bagua.base.option_names import hyphens
from bagua.cli.options import checked, named_files

if TYPE_CHECKING:
    from bagua.proto import common_pb2

# Values of job options from the command line, by the options' names. None: not given.
Given = dict[str, Any]


def parameters(command: str) -> dict[str, inspect.Parameter]:
    """The job options of ``run`` or ``job submit`` as parameters of a function for typer, by the options' names."""
    return {
        name: inspect.Parameter(
            _word(name), inspect.Parameter.KEYWORD_ONLY, default=_default(one), annotation=_annotation(one)
        )
        for name, one in OPTIONS.items()
        if command in one.commands
    }


def option(name: str) -> Any:
    """typer's form of one of them, for commands that have a few: ``Annotated[int, option("nproc_per_node")]``."""
    one = OPTIONS[name]
    return typer.Option(
        *(f"--{hyphens(_word(name))}", *one.flags),
        metavar=one.metavar,
        min=one.least,
        max=one.most,
        parser=_parser(one.parse) if one.parse else None,
        help=one.words,
        show_default="Default:" not in one.words,
    )


def _word(name: str) -> str:
    """``stop_grace_s`` -> ``stop_grace``: help says that it counts seconds."""
    return name.removesuffix("_s")


def _default(one: Option) -> Any:
    """Returns the default; None if the option's own can't be given."""
    given = not one.parse and not one.choices and (one.least is None or one.default >= one.least)
    return one.default if given else None


def _annotation(one: Option) -> Any:
    kind: Any = one.choices or (list[str] if one.kind is dict else one.kind)
    if one.parse:
        kind = inspect.signature(one.parse, eval_str=True).return_annotation
    return Annotated[kind if _default(one) is not None else kind | None, option(one.name)]


def _parser(parse: Any) -> Any:
    def parser(text: str) -> Any:
        try:
            return parse(str(text))
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error

    return parser


def specification(
    script: str, given: Given, *, shipped: bool = False, **more: Unpack[JobOptions]
) -> common_pb2.JobSpec:
    """The job of these options. ``more``: options that the command sets itself. Raises UsageError for what contradicts
    itself."""
    from bagua.client import job_spec

    values = {**given, **spec_nodes(given)}
    check_entry(script, values.get("module", False), values.get("no_python", False))
    values["env"] = parse_env(values.get("env"))
    values["secret_env"] = parse_secret_env(values.get("secret_env"))
    values = {name: value for name, value in values.items() if value is not None}
    spec = checked(job_spec, script, shipped=shipped, **{**values, **more})
    if twice := [name for name in spec.secret_env if name in spec.env]:
        raise UsageError(f"{twice[0]} is given twice: with --env and with --secret-env. [BG107]")
    return spec


def check_entry(script: str, module: bool, no_python: bool) -> None:
    """Refuses -m together with --no-python, and an empty name."""
    if module and no_python:
        raise UsageError("Give -m or --no-python, not both. [BG103]")
    if not script.strip():
        raise UsageError("The name of the script is missing: bagua run [OPTIONS] SCRIPT [ARGS]. [BG104]")


def parse_env(pairs: Collection[str] | None) -> dict[str, str]:
    """``["A=1"]`` -> ``{"A": "1"}``. Raises UsageError for what has no name."""
    for pair in pairs or ():
        if pair.find("=") < 1:
            raise UsageError(f"--env {pair!r}: write NAME=VALUE. [BG107]")
    return dict(pair.split("=", 1) for pair in pairs or ())


def parse_secret_env(pairs: Collection[str] | None) -> dict[str, str]:
    """``["A=file"]`` -> ``{"A": "/here/file"}``: paths are absolute, and those of files on the nodes, which may have
    others than this machine. Raises UsageError for what names no file."""
    return {name: str(Path(path).expanduser().absolute()) for name, path in named_files("--secret-env", pairs)}


def spec_nodes(given: Given) -> Given:
    """The options that say on how many nodes a job runs, and whether it goes on with fewer. ``--nnodes MIN:MAX``,
    --min-nodes and --max-nodes make a job elastic. Raises UsageError for what contradicts itself."""
    found = _spec_nodes(given.get("nnodes"), given)
    if given.get("respawn") and not found["elastic"]:
        raise UsageError("--respawn needs --elastic: without it the job ends with the first rank that is lost. [BG110]")
    return found


def _spec_nodes(nodes: Nodes | None, given: Given) -> Given:
    least, most = given.get("min_nodes"), given.get("max_nodes")
    if nodes is not None and nodes.least is not None:
        if least or most:
            raise UsageError("--nnodes MIN:MAX says it already: leave --min-nodes and --max-nodes out. [BG110]")
        return {"nnodes": nodes.count, "elastic": True, "min_nodes": nodes.least}
    if not (least or most):
        return {"nnodes": nodes.count if nodes else 1, "elastic": given.get("elastic", False)}
    count = nodes.count if nodes else most or least or 1
    least, most = least or 1, most or count
    if least > most:
        raise UsageError(f"--min-nodes {least} is more than the {most} nodes that the job may have. [BG110]")
    if not least <= count <= most:
        raise UsageError(f"--nnodes {count} is not from {least} to {most}, as --min-nodes and --max-nodes say. [BG110]")
    return {"nnodes": count, "elastic": True, "min_nodes": least, "max_nodes": most}
