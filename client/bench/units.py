"""Sizes and lists as they are written on the command line, and what else both sides agree on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bagua.base.errors import ConfigError

RESULT_MARK = "bagua-bench-result "  # begins the line in which rank 0 prints its results where no file can be shared

SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST_SIZE = 64 << 30


def parse_size(text: str) -> int:
    """``64K`` -> 65536 bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?:iB|B)?", text.strip())
    size = int(found.group(1)) * SIZE_UNITS[found.group(2)] if found else 0
    if not 0 < size <= LARGEST_SIZE:
        raise ConfigError(
            f"{text!r} is not a size: write a number with K, M or G (1024, ...), for example 64K. [BG102]"
        )
    return size


def parse_sizes(text: str) -> list[int]:
    """``4K,64K`` -> [4096, 65536]. Raises ConfigError."""
    return [parse_size(part) for part in split(text)]


def split(text: str) -> list[str]:
    """``a,b`` -> ["a", "b"]: each once, in order. Raises ConfigError if there is none."""
    # A dict: each once, in their order.
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ConfigError("An empty list: write one or more values, with commas between them. [BG102]")
    return parts


def choose(text: str, allowed: Sequence[str], what: str) -> list[str]:
    """The parts of ``text``, each of which must be one of ``allowed``. Raises ConfigError, which lists them."""
    parts = split(text)
    for part in parts:
        if part not in allowed:
            raise ConfigError(f"{what} {part!r}: choose from {', '.join(allowed)}. [BG102]")
    return parts


def size_text(size: int) -> str:
    """65536 -> ``64 KiB``; what is no whole number of KiB stays a number of bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"
