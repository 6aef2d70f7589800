"""Words that a node says of a rank that it has ended, and why. The coordinator passes them on."""

from __future__ import annotations

LATE = "It was stopped (SIGSTOP)"
OVERDUE = "It had not ended by itself"
SPENT = "It was let into the job, but has to wait for another newcomer and can't: its daemon has ended it."
ORPHANED = "Its daemon was started again"
ORPHANED_NEWCOMER = f"{ORPHANED} while it prepared to join: others are started."


def island_words(rank: int) -> str:
    """Says in a line which rank of its island was lost."""
    return f"Rank {rank} of its island was lost, so its daemon has ended it."


def late_words(seconds: float) -> str:
    """Says in a line for how long it was seen so."""
    return f"{LATE} for {seconds:.0f} s while others waited, so its daemon has ended it."


def overdue_words(seconds: float, since: str) -> str:
    """Says in a line how long it had to end by itself, and since when."""
    return f"{OVERDUE} {seconds:.0f} s after {since}, so its daemon has ended it."
