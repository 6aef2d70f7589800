"""``--config job.toml``: options of ``bagua run`` and ``bagua job submit`` from a file, and ``--print-config``.

An option is declared once, in the signature of its command. Keys, types and bounds of a file follow from that.
"""

from __future__ import annotations

import inspect
import json
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from bagua.base.errors import UsageError
from bagua.base.job_options import Nodes
from bagua.base.option_names import hyphens

MAX_BYTES = 1 << 20
_NOT_IN_FILES = {"config", "print_config", "context"}
COMMANDS: dict[str, Callable[..., Any]] = {}  # Commands that read such files, by name


@dataclass(frozen=True)
class Declared:
    """An option, or argument, as its command declares it."""

    name: str
    kind: Any  # its type; of a list, that of the list
    info: Any  # typer's
    default: Any

    @property
    def key(self) -> str:
        """Name of the option as files have it."""
        return hyphens(self.name)


def declared(command: Callable[..., Any]) -> dict[str, Declared]:
    """The options that a file may hold for this command, by name."""
    hints = typing.get_type_hints(command, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(command).parameters.items():
        hint, info, default = hints[name], parameter.default, parameter.default
        if typing.get_origin(hint) is Annotated:
            info = next(one for one in hint.__metadata__ if hasattr(one, "param_decls"))
            hint = hint.__origin__
        else:
            default = getattr(info, "default", None)
        if name not in _NOT_IN_FILES and not getattr(info, "hidden", False):
            found[name] = Declared(name, _without_none(hint), info, default)
    return found


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(one for one in typing.get_args(hint) if one is not type(None))
    return hint


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: what the command line leaves out comes from the file."""
    if path is not None and not context.resilient_parsing:
        name = "job submit" if context.info_name == "submit" else str(context.info_name)
        context.default_map = {**(context.default_map or {}), **values(path, name)}
    return path


def values(path: Path, command: str) -> dict[str, Any]:
    """The file's values for ``command``, by names of parameters; a note on standard error names what is for another
    command. Raises UsageError with words."""
    mine = declared(COMMANDS[command])
    others = {name: (other, one) for other, found in COMMANDS.items() for name, one in declared(found).items()}
    taken, idle = {}, []
    for key, value in _document(path).items():
        name = key.replace("-", "_")
        if name not in others or (key != hyphens(name) and key != name):
            near = get_close_matches(hyphens(name), [hyphens(one) for one in others], 1, 0.5)
            hint = f" Do you mean {near[0]}?" if near else ""
            raise UsageError(
                f"--config {path}: there is no option {key!r}.{hint} `bagua {command} --help` lists all. [BG105]"
            )
        other, one = others[name]
        if name in taken:
            raise UsageError(f"--config {path}: {one.key} is there twice: with hyphens and with underscores. [BG105]")
        found = _value(path, mine.get(name, one), value)
        if name in mine:
            taken[name] = found
        else:
            idle.append(f"{one.key} (of `bagua {other}`)")
    if idle:
        print(f"note: {path}: {', '.join(idle)} has no meaning for `bagua {command}`.", file=sys.stderr)
    return taken


def _document(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # one more shows that there is more
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}. [BG105]") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"--config {path}: more than {MAX_BYTES} bytes: that is no file of options. [BG105]")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # editors of Windows begin a file with a mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is no TOML: {error} [BG105]") from error
    except RecursionError as error:
        raise UsageError(f"--config {path}: too many brackets in one another. [BG105]") from error


def _value(path: Path, one: Declared, value: Any) -> Any:
    """A value as a command line would give it, checked in the words of the file. Raises UsageError."""

    def refuse(wanted: str) -> UsageError:
        return UsageError(f"--config {path}: {one.key} is {_toml(value)}: it must be {wanted}. [BG105]")

    if typing.get_origin(one.kind) is list:
        item = typing.get_args(one.kind)[0]
        pairs = "K=" in (one.info.metavar or "")
        if isinstance(value, dict) and pairs and all(type(text) is str for text in value.values()):
            if odd := [key for key in value if "=" in key or not key]:
                raise UsageError(f"--config {path}: {one.key}: {odd[0]!r} can't be the name of a variable. [BG105]")
            return [f"{key}={text}" for key, text in value.items()]
        if isinstance(value, list) and all(type(text) is item for text in value):
            return value
        table = ", or a table of texts" if pairs else ""
        raise refuse(f"a list of {'whole numbers' if item is int else 'texts'}{table}")
    parser = getattr(one.info, "parser", None)
    if parser is not None and type(value) in (int, str):
        try:
            parser(str(value))
        except typer.BadParameter as error:
            raise UsageError(f"--config {path}: {one.key}: {error.message} [BG105]") from error
        return str(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(one.kind, "a text")
    if isinstance(one.kind, type) and issubclass(one.kind, Enum):
        choices = [member.value for member in one.kind]
        if value not in choices:
            raise refuse(f"one of {', '.join(choices)}")
        return value
    fits = {bool: (bool,), int: (int,), float: (int, float)}.get(one.kind, (str,))
    if type(value) not in fits:  # not isinstance: True is an int for it
        raise refuse(wanted)
    least, most = getattr(one.info, "min", None), getattr(one.info, "max", None)
    if (least is not None and value < least) or (most is not None and value > most):
        raise refuse(f"at least {least:g}" if most is None else f"from {least:g} to {most:g}")
    return value


def arguments(context: typer.Context, given: list[str] | None) -> list[str]:
    """The script's arguments: those of the command line, else those of the file. Old versions of click don't look into
    the file for arguments of any number."""
    return list(given or (context.default_map or {}).get("args") or ())


def print_config(context: typer.Context, given: Mapping[str, Any]) -> None:
    """Prints the options of this call as a file for ``--config``, and ends the program. What is at its default is
    there as a comment. ``given``: the parameters by name."""
    lines = [
        "# Options for `bagua run --config FILE` and `bagua job submit --config FILE`. The command line wins over the",
        "# file. Paths begin at the folder in which the command is called.",
    ]
    command = "job submit" if context.info_name == "submit" else str(context.info_name)
    for one in declared(COMMANDS[command]).values():
        value = _plain(arguments(context, given.get("args")) if one.name == "args" else given.get(one.name))
        lines += ["", f"# {one.info.help}"]
        default = one.default
        if value in (None, [], "") or str(value) == str(default):  # as texts: a choice or a path is a text in files
            lines.append(f"# {one.key} = {_toml(_example(one, default))}")
        else:
            lines.append(f"{one.key} = {_toml(value)}")
    print("\n".join(lines))
    raise typer.Exit


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _example(one: Declared, default: Any) -> Any:
    if default is None or default is ...:
        numbers: dict[Any, Any] = {bool: True, int: 1, Nodes: 1}
        if isinstance(one.kind, type) and issubclass(one.kind, Enum):
            return next(iter(one.kind)).value
        return [] if typing.get_origin(one.kind) is list else numbers.get(one.kind, "")
    return str(default) if isinstance(default, Path | Enum) else default


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    # JSON's texts are TOML's, but for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,  # the file's values are there before other options take their defaults
        callback=_read,
        help="Options from a TOML file; the command line wins over it. --print-config writes one.",
    ),
]
PrintConfigOption = Annotated[
    bool, typer.Option("--print-config", help="Print these options as a file for --config, and do nothing.")
]
