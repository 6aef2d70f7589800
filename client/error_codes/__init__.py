"""The codes at the end of error texts, such as ``[BG101]``: what happened, and what to do.

The catalogue is the home of all codes. ``bagua explain`` shows an entry, and ``docs/errors`` is made from it
(``docs/error_pages.py``). Texts name their code as they are written: ``raise ConfigError("… [BG101]")``. A leaf: it
imports the standard library alone.
"""

from __future__ import annotations

import re

from bagua.error_codes import (
    algorithms,
    command_line,
    communication,
    data,
    installation,
    nodes,
    service,
    tensors,
    tools,
    training,
)
from bagua.error_codes.entry import Area as Area
from bagua.error_codes.entry import Entry as Entry

AREAS: tuple[Area, ...] = (
    tools.AREA,
    command_line.AREA,
    installation.AREA,
    algorithms.AREA,
    tensors.AREA,
    communication.AREA,
    training.AREA,
    data.AREA,
    service.AREA,
    nodes.AREA,
)
ENTRIES: dict[str, Entry] = {entry.code: entry for area in AREAS for entry in area.entries}

_CODE = re.compile(r"\bBG\d{3}\b", re.IGNORECASE)
_SHORT = re.compile(r"\W*(?:BG)?[ _-]?#?(\d{3})\W*", re.IGNORECASE)


def codes_in(text: str) -> list[str]:
    """The codes that ``text`` (a code, or any part of a log) names, each once, in their order there."""
    return list(dict.fromkeys(found.upper() for found in _CODE.findall(text)))


def code_of(text: str) -> str:
    """The code that a user means by "501", "bg501", "BG-501", with brackets or without. Any other text as it is."""
    found = _SHORT.fullmatch(text.strip())
    return f"BG{found[1]}" if found else text


def area_of(code: str) -> Area:
    """The area of a known code. Raises KeyError."""
    entry = ENTRIES[code]
    return next(area for area in AREAS if entry in area.entries)
