"""One code of the catalogue, and a group of them."""

from __future__ import annotations

from dataclasses import dataclass


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
    introduction: str
    entries: tuple[Entry, ...]
