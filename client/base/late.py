"""Words that a node says of a rank that it has ended, and why. The coordinator passes them on."""

from __future__ import annotations

LATE = "It was stopped (SIGSTOP)"
ORPHANED = "Its daemon was started again"
ORPHANED_NEWCOMER = f"{ORPHANED} while it prepared to join: others are started."


def late_words(seconds: float) -> str:
    """For how long it was seen so, as a line."""
    return f"{LATE} for {seconds:.0f} s while others waited, so its daemon has ended it."
