"""The versions of torch that were tested. Pages and ``bagua doctor`` go by this list: a new one is added here, and the
test of the pages names the sentence and the row that it needs (``tests/unit/torch_api/test_torch_versions.py``)."""

from __future__ import annotations

import re

TESTED = ("2.4.1", "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.13.0")


def numbers(version: str) -> tuple[int, ...]:
    """The first two: those of "2.13.0+cpu" are 2 and 13."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def minor(version: str) -> str:
    """The version as people say it: "2.13"."""
    return ".".join(map(str, numbers(version)))


OLDEST, NEWEST = numbers(TESTED[0]), numbers(TESTED[-1])
TESTED_WORDS = f"{minor(TESTED[0])} to {minor(TESTED[-1])}"
