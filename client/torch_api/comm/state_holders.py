"""Decides who of a generation holds the job's state, and when newcomers are let in. It is pure: values alone.

A newcomer gets the state of the others between two training steps, which all but newcomers pass equally often: each
time is a *lap*. On entering a generation all tell each other where they stand. Newcomers are let in at once if all
others are between two steps, and otherwise when these have finished the lap that the furthest of them has begun.

State is copied whole or not at all, like a unit (``commit/ledger.py``): a member at which it has arrived, or which
has sent it, is *ready*, and says so to the others. Who hears that all are has *let in* the newcomers. If a generation
ends in between, and one has let them in, all do, because the state was whole everywhere. Otherwise it is copied again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Standing(NamedTuple):
    """Place of a member in the training, and how much of the state it has.

    ``whole``: it holds the job's state. ``between``: it is between two steps, and waits there. ``laps``: how often it
    has passed there. ``ready``, ``let_in``: the newest generation in which it was ready, and in which it let newcomers
    in; 0: none.
    """

    whole: bool
    between: bool
    laps: int
    ready: int = 0
    let_in: int = 0


class Outcome(NamedTuple):
    """``newcomers``: members without state. ``copies``: they get it now. ``lap``: otherwise, after the lap of that
    number."""

    newcomers: frozenset[int]
    copies: bool
    lap: int


def is_whole(mine: Standing, everyone: Mapping[int, Standing]) -> bool:
    """Returns True if a member holds the state: it does, or has it ready, and some member let it in."""
    return mine.whole or (mine.ready > 0 and any(other.let_in == mine.ready for other in everyone.values()))


def settle(everyone: Mapping[int, Standing]) -> Outcome:
    """The outcome for a generation of these members, by number. Raises ValueError if none holds the state."""
    whole = {member for member, one in everyone.items() if is_whole(one, everyone)}
    if not whole:
        raise ValueError(f"None of the members {sorted(everyone)} holds the state of the job: those that did are gone.")
    newcomers = frozenset(everyone) - whole
    copies = bool(newcomers) and all(everyone[member].between for member in whole)
    return Outcome(newcomers, copies, max(everyone[member].laps for member in whole))
