"""Checks of blocks of code (``pages.py``) that run nothing: Python compiles, and each name of ``bagua`` exists; options
of ``bagua`` exist; documents parse, and a BaguaJob is one that the operator takes."""

import ast
import importlib
import json
import re
import shlex
import sys
import textwrap
import tomllib
from functools import cache

import typer
import yaml

from bagua.base.errors import ConfigError
from bagua.operator.job import KIND, parse
from rig.docs import pages

PLAIN = ("text", "protobuf", "cpp", "dockerfile")
"""Languages of blocks that show something: output, pictures, parts of files."""
# The root of usage errors in whatever click this typer brings along.
USAGE_ERROR = typer.BadParameter.__mro__[2]
_WORD = re.compile(r"(?:^|[;&|(] *|\$\()(?:\w+=\S* )*bagua( .*)$")
_EXTRAS = re.compile(r"\bbagua\[([\w,-]+)\]")


def wrong(block):
    """Words on a block whose content can't be right, or nothing."""
    try:
        if block.language in pages.SHELLS:
            check_commands(block)
        elif block.language == "python":
            check_python(block.text)
        elif block.language == "diff":
            check_python(after(block.text))
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                if isinstance(document, dict) and document.get("kind") == KIND:
                    parse(document["spec"])
        elif block.language not in PLAIN:
            return f"{block.where}: blocks of {block.language!r} are not checked; plain ones are {', '.join(PLAIN)}"
    except (SyntaxError, ValueError, AttributeError, ImportError, ConfigError, yaml.YAMLError) as error:
        return f"{block.where}: {error}"
    return ""


def after(diff):
    """The new lines of a change."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(("-", "@@")))


def check_python(text):
    """It compiles, and its names of ``bagua`` exist. Raises SyntaxError, ImportError or AttributeError."""
    tree = ast.parse(textwrap.dedent(text))
    known = {"bagua": "bagua.torch_api"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _ours(node.module):
            for alias in node.names:
                _resolve(f"{node.module}.{alias.name}")
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _ours(alias.name):
                    _resolve(alias.name)
                    known[alias.asname or "bagua"] = alias.name if alias.asname else "bagua"
    own = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if len(dotted) > 1 and dotted[0] in known.keys() - own:
            _resolve(".".join([known[dotted[0]], *dotted[1:]]))


def _ours(module):
    return module is not None and module.partition(".")[0] == "bagua" and module.split(".")[1:2] != ["lightning"]


def _dotted(node):
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return [*inner, node.attr] if inner else []
    return []


@cache
def _resolve(name):
    """The object of a dotted name. Attributes of instances are not looked at."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        owner, _, last = name.rpartition(".")
        if not owner or (error.name is not None and not error.name.startswith("bagua")):
            raise
        found = _resolve(owner)
        if isinstance(found, type) or isinstance(found, type(sys)):
            return getattr(found, last)
        return getattr(found, last, None)


@cache
def command_line():
    """All commands of ``bagua`` by their whole names."""
    sys.path.append(str(pages.ROOT / "deploy"))
    try:
        return importlib.import_module("man").commands()
    finally:
        sys.path.remove(str(pages.ROOT / "deploy"))


@cache
def extras():
    """Names in ``pip install "bagua[NAME]"``."""
    return {*tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


def check_commands(block):
    """Commands and options of ``bagua`` exist, and its extras. Raises ValueError."""
    for line, command in block.commands:
        if unknown := {name for given in _EXTRAS.findall(command) for name in given.split(",")} - extras():
            raise ValueError(f"line {line}: bagua has no extra {', '.join(sorted(unknown))}")
        if found := _WORD.search(command):
            try:
                check_command(found[1])
            except ValueError as error:
                raise ValueError(f"line {line}: {error}") from error


def check_command(words):
    """Raises ValueError for a command, or an option, that does not exist."""
    try:
        parts = shlex.split(re.split(r" [|&;<>]|\d?>|\)", words)[0])
    except ValueError:
        return  # a part of a longer line
    commands = command_line()
    name = "bagua"
    while parts and f"{name} {parts[0]}" in commands:
        name += f" {parts.pop(0)}"
    command = commands[name]
    if hasattr(command, "commands") and parts and re.fullmatch(r"[a-z][a-z-]*", parts[0]):
        raise ValueError(f"there is no command {name} {parts[0]}")
    context = command.context_class(command, info_name=name, **command.context_settings)
    try:
        command.make_parser(context).parse_args([part for part in parts if part not in ("--help", "…", "...")])
    except USAGE_ERROR as error:
        raise ValueError(f"{name}: {error.format_message()}") from None
