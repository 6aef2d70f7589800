"""Makes docs/errors from the catalogue ``bagua.error_codes`` and the error texts in the sources:
``python docs/error_pages.py``. A test compares the pages with what this makes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from bagua.error_codes import AREAS, Area, Entry

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("algorithms", "client", "csrc", "daemon", "deploy/kubernetes/operator")
CODE = re.compile(r"\[(BG\d{3})\]")
LEFT_OUT = "…"
"""Stands for what the program puts into a text."""
MADE = "<!-- Made by docs/error_pages.py: change client/error_codes instead. -->"


def sources() -> Iterator[Path]:
    """Our files in which errors are made."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".cu") and "_pb2" not in path.name:
                yield path


def texts_of(path: Path) -> Iterator[str]:
    """The texts with a code in a file. Of C++ they are the last pieces of texts."""
    content = path.read_text()
    if not CODE.search(content) and "[BG" not in content:
        return
    if path.suffix == ".py":
        for node in _topmost(ast.parse(content)):
            yield _words(node)
    else:
        yield from (f"{LEFT_OUT} {piece}" for piece in re.findall(r'"[. ]*([^"\n]*\[BG\d{3}\])"', content))


def _topmost(node: ast.AST) -> Iterator[ast.expr]:
    """Strings, and sums of strings, that are no part of another one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr | ast.Constant | ast.BinOp) and CODE.search(_words(child)):
            yield child
        else:
            yield from _topmost(child)


def _words(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else LEFT_OUT
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_words, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    return LEFT_OUT


def texts() -> dict[str, list[str]]:
    """By code: the texts of the sources, without the code, each once; none of a few words."""
    found: dict[str, set[str]] = {}
    for path in sources():
        for text in texts_of(path):
            for code in CODE.findall(text):
                words = " ".join(CODE.sub("", text).split())
                known = found.setdefault(code, set())
                if len(re.findall(r"[^\W\d_]{2,}", words)) > 3:
                    known.add(words)
    return {code: sorted(known, key=str.lower) for code, known in found.items()}


def page(area: Area, found: dict[str, list[str]]) -> str:
    """An area's page."""
    parts = [f"# {area.title}", MADE, area.introduction, "[All codes](README.md)"]
    for entry in area.entries:
        parts += [f"## {entry.code}", f"**{entry.title}.** {entry.cause}", f"Remedy: {entry.remedy}"]
        known = found.get(entry.code, [])
        if known:
            parts += ["Texts:", "\n".join(["```text", *known, "```"])]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The page that lists all codes."""
    parts = [
        "# Error codes",
        MADE,
        "An error of Bagua ends with a code, such as `[BG101]`. `bagua explain BG101` shows its cause and remedy in a "
        "terminal; `bagua explain` takes a whole error text, too. Programs find the code as `error.code` of a "
        "`BaguaError`. An error that quotes another one has several codes: the first one is nearest to the cause.",
        "On the pages, `…` in a text stands for what the program puts there. Symptoms without an error are in "
        "[troubleshooting](../troubleshooting.md).",
    ]
    for area in AREAS:
        rows = "\n".join(_row(area, entry) for entry in area.entries)
        parts += [f"## {area.title}", f"| code | meaning |\n|---|---|\n{rows}"]
    return "\n\n".join(parts) + "\n"


def _row(area: Area, entry: Entry) -> str:
    return f"| [{entry.code}]({area.page}.md#{entry.code.lower()}) | {entry.title} |"


def pages() -> dict[str, str]:
    """Contents by file name below docs/errors."""
    found = texts()
    return {"README.md": index(), **{f"{area.page}.md": page(area, found) for area in AREAS}}


def main() -> None:
    """Writes the pages."""
    folder = ROOT / "docs" / "errors"
    folder.mkdir(exist_ok=True)
    for name, content in pages().items():
        (folder / name).write_text(content)


if __name__ == "__main__":
    main()
