"""Sizes, rates and networks as they are written on the command line, and what else both sides agree on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.base.errors import ConfigError

RESULT_MARK = "bagua-bench-result "
"""Begins the line in which rank 0 prints its results where no file can be shared."""

SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LARGEST_SIZE = 64 << 30
LOWEST_RATE, HIGHEST_RATE = 1e5, 1e11
LONGEST_DELAY_S = 10.0

TCP_SHARE = 1448 / 1514
"""Share of an Ethernet line's rate that TCP's payload can have: segments of 1448 bytes in frames of 1514 (as tbf counts
them)."""


def parse_size(text: str) -> int:
    """``64K`` -> 65536 bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?:iB|B)?", text.strip())
    size = int(found.group(1)) * SIZE_UNITS[found.group(2)] if found else 0
    if not 0 < size <= LARGEST_SIZE:
        raise ConfigError(f"{text!r} is not a size: write a number with K, M or G (1024, ...), for example 64K.")
    return size


def parse_sizes(text: str) -> list[int]:
    """``4K,64K`` -> [4096, 65536]. Raises ConfigError."""
    return [parse_size(part) for part in split(text)]


def split(text: str) -> list[str]:
    """``a,b`` -> ["a", "b"]: each once, in order. Raises ConfigError if there is none."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ConfigError("An empty list: write one or more values, with commas between them.")
    return parts


def choose(text: str, allowed: Sequence[str], what: str) -> list[str]:
    """The parts of ``text``, each of which must be one of ``allowed``. Raises ConfigError, which lists them."""
    parts = split(text)
    for part in parts:
        if part not in allowed:
            raise ConfigError(f"{what} {part!r}: choose from {', '.join(allowed)}.")
    return parts


def size_text(size: int) -> str:
    """65536 -> ``64 KiB``; what is no whole number of KiB stays a number of bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


@dataclass(frozen=True)
class Network:
    """The wire between two hosts. ``rate``: bits per second in each direction, 0 for as fast as it goes. ``delay_s``:
    one way."""

    rate: float = 0.0
    delay_s: float = 0.0

    @property
    def name(self) -> str:
        """As it is written on the command line: ``1gbit,5ms``."""
        rate = "none"
        if self.rate:
            unit = next(unit for unit in ("gbit", "mbit", "kbit") if self.rate >= RATE_UNITS[unit])
            rate = f"{self.rate / RATE_UNITS[unit]:g}{unit}"
        return f"{rate},{self.delay_s * 1e3:g}ms" if self.delay_s else rate

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket: 2 ms of the rate, at least 16 KiB; 0 without a rate."""
        return max(16 << 10, int(self.rate / 8 / 500)) if self.rate else 0

    def floor_s(self, wire_bytes: float, trips: int) -> float:
        """Seconds in which ``wire_bytes`` can pass in one direction, as payload of TCP, and ``trips`` delays. What
        fits into the bucket of a shaped link passes at once."""
        if not self.rate:
            return trips * self.delay_s
        free = 0 if self.delay_s else self.burst_bytes  # the relay has no bucket
        return max(0.0, wire_bytes - free) * 8 / (self.rate * TCP_SHARE) + trips * self.delay_s


def parse_network(text: str) -> Network:
    """``1gbit``, ``100mbit,5ms``, ``none`` or ``none,5ms``. Raises ConfigError."""
    rate_text, comma, delay_text = text.strip().lower().partition(",")
    rate = 0.0 if rate_text == "none" else _parse(rate_text, RATE_UNITS)
    delay = _parse(delay_text, TIME_UNITS) if comma else 0.0
    if rate is None or delay is None:
        raise ConfigError(f"{text!r} is not a network: write RATE[,DELAY], for example 1gbit, 100mbit,5ms or none.")
    if rate_text != "none" and not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise ConfigError(f"{text!r}: the rate must be from 100kbit to 100gbit, or none.")
    if delay > LONGEST_DELAY_S:
        raise ConfigError(f"{text!r}: the delay must be at most {LONGEST_DELAY_S:g}s.")
    return Network(rate, delay)


def _parse(text: str, units: dict[str, float]) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip())
    if not found or found.group(2) not in units:
        return None
    return float(found.group(1)) * units[found.group(2)]
