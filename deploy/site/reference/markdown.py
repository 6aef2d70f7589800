"""Parts of pages in Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable


def anchor(name: str) -> str:
    """A place that links lead to; ``name``: letters, digits, ``.``, ``_`` and ``-``."""
    return f'<a id="{name}"></a>'


def escaped(text: str) -> str:
    """Plain text with code in backticks, where nothing but that code means anything."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part.startswith("`") else _bare(part) for part in parts)


def _bare(text: str) -> str:
    return re.sub(r"([|*_\[\]\\])", r"\\\1", html.escape(text, quote=False))


def row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Makes a table. Cells are Markdown."""
    names = list(titles)
    return "\n".join([row(*names), "|" + "---|" * len(names), *(row(*cells) for cells in rows)]) + "\n"
