"""The wire between two hosts: as it is written, ``1gbit,5ms``, and as it is found from measured messages."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.base.errors import ConfigError

# A wire is told apart from others up to this rate, and from this delay on: beyond them the machine decides.
FAST_MBIT, NEAR_MS = 4096.0, 1.0
RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LOWEST_RATE, HIGHEST_RATE = 1e5, 1e11
LONGEST_DELAY_S = 10.0

# Share of an Ethernet line's rate that TCP's payload can have: segments of 1448 bytes in frames of 1514 (as tbf counts
# them).
TCP_SHARE = 1448 / 1514


@dataclass(frozen=True)
class Network:
    """The wire between two hosts. ``rate``: bits per second in each direction, 0 for as fast as it goes. ``delay_s``:
    one way."""

    rate: float = 0.0
    delay_s: float = 0.0

    @property
    def name(self) -> str:
        """The network as it is written on the command line: ``1gbit,5ms``."""
        rate = "none"
        if self.rate:
            unit = next((unit for unit in ("gbit", "mbit") if self.rate >= RATE_UNITS[unit]), "kbit")
            rate = f"{self.rate / RATE_UNITS[unit]:g}{unit}"
        return f"{rate},{self.delay_s * 1e3:g}ms" if self.delay_s else rate

    @property
    def payload_rate(self) -> float:
        """Bytes of TCP's payload per second in each direction; infinite without a rate."""
        return self.rate * TCP_SHARE / 8 if self.rate else math.inf

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
        return max(0.0, wire_bytes - free) / self.payload_rate + trips * self.delay_s


def parse_network(text: str) -> Network:
    """``1gbit``, ``100mbit,5ms``, ``none`` or ``none,5ms``. Raises ConfigError."""
    rate_text, comma, delay_text = text.strip().lower().partition(",")
    rate = 0.0 if rate_text == "none" else _parse(rate_text, RATE_UNITS)
    delay = _parse(delay_text, TIME_UNITS) if comma else 0.0
    if rate is None or delay is None:
        raise ConfigError(
            f"{text!r} is not a network: write RATE[,DELAY], for example 1gbit, 100mbit,5ms or none. [BG004]"
        )
    if rate_text != "none" and not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise ConfigError(f"{text!r}: the rate must be from 100kbit to 100gbit, or none. [BG004]")
    if delay > LONGEST_DELAY_S:
        raise ConfigError(f"{text!r}: the delay must be at most {LONGEST_DELAY_S:g}s. [BG004]")
    return Network(rate, delay)


def _parse(text: str, units: dict[str, float]) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip())
    if not found or found.group(2) not in units:
        return None
    return float(found.group(1)) * units[found.group(2)]


def fit_network(samples: Sequence[tuple[float, float]], trips: int = 1) -> Network:
    """The network on which messages of so many bytes take so many seconds, (bytes, seconds) each: seconds = ``trips``
    delays + bytes / rate.

    The line is that of Theil and Sen (the median of all slopes), which a few slow messages do not move. Raises
    ValueError unless there are two different sizes, or if large messages were no slower than small ones.
    """
    slopes = [
        (later - sooner) / (larger - smaller)
        for (smaller, sooner), (larger, later) in itertools.combinations(sorted(samples), 2)
        if larger > smaller  # two of one size have no slope
    ]
    if not slopes:
        raise ValueError("A network can't be fitted to messages of one size: measure at least two sizes. [BG004]")
    slope = statistics.median(slopes)
    if slope <= 0:
        raise ValueError("Large messages were as fast as small ones: measure larger ones, or more of them. [BG004]")
    rest = statistics.median(seconds - slope * size for size, seconds in samples)
    return Network(8 / (slope * TCP_SHARE), max(0.0, rest) / trips)  # by noise the line may begin below zero


def measured_network(hosts: int, sizes: str, rate: float, trip_s: float) -> tuple[str, Network]:
    """A measured network of ``hosts`` of ``sizes`` ranks: in words so coarse that they are the same next time, and as a
    wire for predictions. ``rate``: bits per second."""
    mbit, delay = min(FAST_MBIT, _coarse(rate / 1e6, 4)), max(NEAR_MS, _coarse(trip_s * 1e3, 4))
    words = f"{hosts} hosts of {sizes}, {mbit:g} Mbit/s, {delay:g} ms"
    return words, Network(rate if mbit < FAST_MBIT else 0.0, trip_s if delay > NEAR_MS else 0.0)


def _coarse(value: float, factor: int) -> float:
    """The nearest power of ``factor``."""
    power = 1.0
    while power * factor**0.5 < value:  # the middle between two powers, on a logarithmic scale
        power *= factor
    while power > value * factor**0.5:
        power /= factor
    return power
