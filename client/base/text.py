"""Text that came from elsewhere, as a terminal and a JSON document may take it."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_RESET = "\x1b[0m"


def printable(text: str, lines: bool = False) -> str:
    r"""``text`` with \x1b and the like instead of what a terminal would obey: control characters, and characters that
    change the direction or the end of a line. ``lines``: line ends and tabs stay."""
    if text.isascii() and text.isprintable():  # most lines: one look is enough
        return text
    return "".join(
        _escaped(character) if _is_control(character) and not (lines and character in "\n\t") else character
        for character in text
    )


def printable_output(line: str) -> str:
    """A line that a rank printed, for a terminal: tabs and colours stay, and colours end with the line. Nothing else
    is obeyed, since a rank's output may hold what somebody else has written (the log of a job of another user, a text
    from a data set), and a terminal that obeys it can be made to rewrite what is on it, or its clipboard."""
    if line.isascii() and line.isprintable():
        return line
    parts = _COLOUR.split(line)
    shown = "".join(part if index % 2 else printable(part, lines=True) for index, part in enumerate(parts))
    return shown + _RESET if len(parts) > 1 else shown


def _is_control(character: str) -> bool:
    # U+200C and U+200D belong to words and emoji.
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200c\u200d"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def json_text(document: Any, indent: int | None = None) -> str:
    """JSON that every parser takes: numbers that JSON has no words for are texts, as in protobuf's own mapping:
    "NaN", "Infinity", "-Infinity". So a reader still sees which of them it was."""
    return json.dumps(_finite(document), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
