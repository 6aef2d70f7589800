"""Parts of the original that this version lacks. Whoever imports one learns what it is, and what to use meanwhile.

The finder below is asked last, after all that finds real modules: a part that comes with a later version takes effect
by being there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

MISSING = {
    "bagua.distributed": "its launchers; use `bagua run` (see `bagua run --help`) or torchrun",
}
"""Of each: its contents; and a way to do without."""


def explain(name: str) -> str | None:
    """The message for an import of the module ``name``; None if it is none of these."""
    if name not in MISSING:
        return None
    what, _, meanwhile = MISSING[name].partition("; ")
    return f"{name} ({what}) is not in this version of Bagua; a later one will have it. Meanwhile: {meanwhile}."


class MissingParts:
    """The last finder of modules."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Finds nothing. Raises ImportError for a part that is missing."""
        words = explain(name)
        if words is not None:
            raise ImportError(words, name=name)


def install() -> None:
    """Idempotent."""
    if MissingParts not in sys.meta_path:
        sys.meta_path.append(MissingParts)
