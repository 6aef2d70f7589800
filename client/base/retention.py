"""The amount of the past that a service keeps: by age, by number, by size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bagua.base.errors import ConfigError

_SECONDS = {"d": 86_400.0, "h": 3_600.0}
_BYTES = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
NO_NUMBER = 2**62  # No limit of their number


@dataclass(frozen=True)
class Keep:
    """Jobs that ended at most ``age_s`` ago, of these the ``jobs`` newest, of those as many as have ``size`` bytes."""

    age_s: float = 30 * 86_400.0
    jobs: int = 10_000
    size: float = math.inf


def parse_keep(text: str, option: str = "--keep") -> Keep:
    """``30d``, ``12h``, ``5000`` (jobs), ``10G`` (bytes; also M and T), or several of them: ``30d,5000,10G``. What is
    not said has no limit; ``forever``: nothing has. Raises ConfigError, which names ``option``."""
    age_s, jobs, size = math.inf, NO_NUMBER, math.inf
    if text == "forever":
        return Keep(age_s, jobs, size)
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})([dhMGT]?)", part.strip())
        if found is None:
            raise ConfigError(
                f"{option} {text!r} can't be understood: write 30d, 12h, a number of jobs, a size (10G), several of "
                "them (30d,10000,10G), or forever. [BG102]"
            )
        number, unit = int(found[1]), found[2]
        if unit in _SECONDS:
            age_s = number * _SECONDS[unit]
        elif unit:
            size = float(number * _BYTES[unit])
        else:
            jobs = number
    return Keep(age_s, jobs, size)
