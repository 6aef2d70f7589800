"""The codes at the end of error texts, such as ``[BG101]``: cause and remedy of each, read from the pages of
``docs/errors``, which the wheel brings along as ``bagua.error_pages``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PAGES = Path(__file__).parent / "error_pages"
_ENTRY = re.compile(r"^## (BG\d{3})\n\n\*\*(.+?)\.\*\* (.+)\n\nRemedy: (.+)$", re.MULTILINE)
_CODE = re.compile(r"\bBG\d{3}\b", re.IGNORECASE)
_SHORT = re.compile(r"\W*(?:BG)?[ _-]?#?(\d{3})\W*", re.IGNORECASE)


@dataclass(frozen=True)
class Entry:
    """The meaning of a code. ``cause`` and ``remedy`` are whole sentences in Markdown without links."""

    code: str
    title: str
    cause: str
    remedy: str


@dataclass(frozen=True)
class Area:
    """The codes with one first digit; ``page`` is the name of their page in ``docs/errors``, without ``.md``."""

    page: str
    title: str
    entries: tuple[Entry, ...]


@cache
def areas() -> tuple[Area, ...]:
    """Returns all codes by area, in the order of the codes."""
    pages = [path for path in _PAGES.glob("*.md") if path.stem != "README"]
    return tuple(sorted(map(_area, pages), key=lambda area: area.entries[0].code))


def _area(path: Path) -> Area:
    text = path.read_text(encoding="utf-8")
    return Area(path.stem, text.partition("\n")[0].removeprefix("# "), tuple(Entry(*e) for e in _ENTRY.findall(text)))


@cache
def entries() -> dict[str, Entry]:
    """Returns the entries by code."""
    return {entry.code: entry for area in areas() for entry in area.entries}


def codes_in(text: str) -> list[str]:
    """The codes that ``text`` (a code, or any part of a log) names, each once, in their order there."""
    return list(dict.fromkeys(found.upper() for found in _CODE.findall(text)))


def code_of(text: str) -> str:
    """The code that a user means by "501", "bg501", "BG-501", with brackets or without. Any other text as it is."""
    found = _SHORT.fullmatch(text.strip())
    return f"BG{found[1]}" if found else text


def area_of(code: str) -> Area:
    """The area of a known code."""
    return next(area for area in areas() if any(entry.code == code for entry in area.entries))
