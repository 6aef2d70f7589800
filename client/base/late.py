"""Words that a node says of a rank that it has ended because it was stopped. The coordinator passes them on."""

from __future__ import annotations

LATE = "It was stopped (SIGSTOP)"


def late_words(seconds: float) -> str:
    """For how long it was seen so, as a line."""
    return f"{LATE} for {seconds:.0f} s while others waited, so its daemon has ended it."
