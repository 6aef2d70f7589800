"""Blocks of commands on the pages for operators, and which test shows each of them.

A block without a mark is run as it stands by ``tests/e2e/test_pages.py``, in the order of the page. The others have a
comment before them: ``<!-- shown by tests/FILE.py::test_name -->`` where a test does the same in its own way, or
``<!-- not run: REASON -->`` where nothing here can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PLAYED = ("operations", "security", "service", "observability", "metrics")
"""Pages whose blocks are run."""
MARKED = ("dashboard", "install", "kubernetes", "releasing", "runbooks", "slurm")
"""Pages on which each block has a mark: their commands need a cluster, a package index, or root."""
FOLLOWED = tuple(
    sorted(
        str(path.relative_to(DOCS).with_suffix(""))
        for folder in ("tutorials", "howto", "moving")
        for path in (DOCS / folder).glob("*.md")
    )
)
"""Pages that a reader follows from the first line to the last, and so does ``tests/e2e/test_pages.py``. A block with a
title is a file that the reader writes; cells of a notebook have the title ``cell``."""

_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?')
_MARK = re.compile(r"^<!-- (shown by|not run:) (.+) -->$")
SHELLS = ("", "sh", "bash", "console")
"""Languages of fences that are commands. Blocks that are indented always are."""


@dataclass(frozen=True)
class Block:
    """``line``: number of the first command. ``mark``: "shown by", "not run:", or none. ``file``: the name of the file
    that the block is, or nothing if it is commands."""

    page: str
    line: int
    text: str
    mark: str = ""
    reason: str = ""
    file: str = ""

    @property
    def commands(self) -> Iterator[tuple[int, str]]:
        """Commands with the numbers of their lines; without comments, continued lines as one."""
        begun, number = "", self.line
        for line_number, line in enumerate(self.text.splitlines(), self.line):
            begun, number = (begun, number) if begun else ("", line_number)
            begun += re.sub(r"(^|\s+)#\s.*$", "", line).strip()
            if begun.endswith("\\"):
                begun = begun[:-1]
            elif begun:
                yield number, begun
                begun = ""


def blocks(text: str, page: str = "") -> list[Block]:
    """All blocks of commands, and all files, of a page, in order."""
    found: list[Block] = []
    mark = ("", "")
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin = at
        fence, marked = _FENCE.match(lines[at]), _MARK.match(lines[at])
        if fence:
            at = next(end for end in range(begin + 1, len(lines)) if lines[end].startswith("```"))
            if fence[2]:
                found.append(Block(page, begin + 2, "\n".join(lines[begin + 1 : at]) + "\n", *mark, file=fence[2]))
            elif fence[1] in SHELLS:
                found.append(Block(page, begin + 2, "\n".join(lines[begin + 1 : at]), *mark))
        elif _indented(lines, at):
            while at + 1 < len(lines) and lines[at + 1].startswith("    "):
                at += 1
            found.append(Block(page, begin + 1, "\n".join(line[4:] for line in lines[begin : at + 1]), *mark))
        if marked:
            mark = (marked[1], marked[2])
        elif lines[at].strip():
            mark = ("", "")
        at += 1
    return found


def _indented(lines: list[str], at: int) -> bool:
    """Whether a block of code begins here: it is no continuation of a list's item."""
    return lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip())


def of_page(name: str) -> list[Block]:
    """The blocks of a page of docs/."""
    return blocks((DOCS / f"{name}.md").read_text(), name)
