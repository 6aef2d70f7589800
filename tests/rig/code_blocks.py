"""All blocks of code on all pages, and ways to check them without running them.

``pages.py`` says which commands are run. Here the other blocks are looked at as well: Python compiles, and each name of
``bagua`` exists; options of ``bagua`` exist; documents parse.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from rig import pages

ROOT = pages.DOCS.parent
PLAIN = ("text", "protobuf", "cpp", "dockerfile")
"""Languages of blocks that show something: output, pictures, parts of files."""
README = {
    "python3 deploy/dev.py demo": "tests/e2e/test_examples.py::test_digits_on_two_nodes",
    "python3 deploy/dev.py test": "CI",
    "bagua run --nproc-per-node 2 train.py": "tests/e2e/test_run.py::test_a_script_alone",
    " bagua (command line) ──gRPC──► coordinator": "a picture",
    "bagua run --elastic --nproc-per-node 4 --respawn 10": "tests/e2e/test_elastic_join.py",
}
"""Begins of blocks of the first page, which has no room for marks, and where they are shown."""
# The root of usage errors in whatever click this typer brings along.
USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?')
_MARK = re.compile(r"^<!-- (shown by|not run:) (.+) -->$")
_WORD = re.compile(r"(?:^|[;&|(] *|\$\()(?:\w+=\S* )*bagua( .*)$")


@dataclass(frozen=True)
class Block:
    """``language``: of the fence; empty: commands. ``line``: number of its first line. ``mark``: as in ``pages``."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    reason: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_commands(self) -> bool:
        return self.language in pages.SHELLS


def all_pages() -> list[Path]:
    """All Markdown files of the checkout, but the changelog: pages, READMEs, and others."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "*.md"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for line in listed.splitlines() if (path := ROOT / line).exists() and path.name != "CHANGELOG.md"]


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page, in order."""
    mark = ("", "")
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        begin = at
        fence, marked = _FENCE.match(lines[at].strip()), _MARK.match(lines[at])
        if fence:
            indent = len(lines[at]) - len(lines[at].lstrip())
            at = next(end for end in range(begin + 1, len(lines)) if lines[end].strip() == "```")
            text = "\n".join(line[indent:] for line in lines[begin + 1 : at])
            yield Block(page, begin + 2, fence[1], text, *mark)
        elif pages._indented(lines, at):
            while at + 1 < len(lines) and lines[at + 1].startswith("    "):
                at += 1
            yield Block(page, begin + 1, "", "\n".join(line[4:] for line in lines[begin : at + 1]), *mark)
        if marked:
            mark = (marked[1], marked[2])
        elif lines[at].strip():
            mark = ("", "")
        at += 1


def unshown(block: Block) -> str:
    """Words on a block of commands that no test runs and no mark excuses, or nothing."""
    inside = block.page.is_relative_to(pages.DOCS)
    name = block.page.relative_to(pages.DOCS).with_suffix("").as_posix() if inside else ""
    if block.mark == "shown by":
        path, _, test = block.reason.partition("::")
        file = ROOT / path
        known = file.exists() and re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE)
        return "" if known else f"{block.where}: there is no test {block.reason}"
    if block.mark or name in (*pages.PLAYED, *pages.FOLLOWED):
        return ""
    if block.page == ROOT / "README.md" and any(block.text.startswith(begin) for begin in README):
        return ""
    return f"{block.where}: no test runs this. Mark it as tests/rig/pages.py says"


def wrong(block: Block) -> str:
    """Words on a block whose content can't be right, or nothing."""
    try:
        if block.is_commands:
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
            [*yaml.safe_load_all(block.text)]
        elif block.language not in PLAIN:
            return f"{block.where}: blocks of {block.language!r} are not checked; plain ones are {', '.join(PLAIN)}"
    except (SyntaxError, ValueError, AttributeError, ImportError, yaml.YAMLError) as error:
        return f"{block.where}: {error}"
    return ""


def after(diff: str) -> str:
    """The new lines of a change."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(("-", "@@")))


def check_python(text: str) -> None:
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


def _ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "bagua" and module.split(".")[1:2] != ["lightning"]


def _dotted(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return [*inner, node.attr] if inner else []
    return []


@cache
def _resolve(name: str) -> Any:
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
def command_line() -> dict[str, Any]:
    """All commands of ``bagua`` by their whole names."""
    sys.path.append(str(ROOT / "deploy"))
    try:
        return importlib.import_module("man").commands()
    finally:
        sys.path.remove(str(ROOT / "deploy"))


def check_commands(block: Block) -> None:
    """Commands and options of ``bagua`` exist. Raises ValueError."""
    plain = pages.Block(str(block.page), block.line, block.text)
    for line, command in plain.commands:
        if found := _WORD.search(command):
            try:
                check_command(found[1])
            except ValueError as error:
                raise ValueError(f"line {line}: {error}") from error


def check_command(words: str) -> None:
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
