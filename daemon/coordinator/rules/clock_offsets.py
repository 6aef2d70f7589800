"""Puts the times of nodes on one clock: pure functions over probes, each of which is answered with a time.

A node has read its clock at some moment between the probe and its answer. So the offset of the clocks is known within
half of the time that the exchange took: the quickest exchange knows it best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Times in ns: when a probe was sent and its answer came, by the coordinator's clock; the node's clock between."""

    sent: int
    told: int
    came: int


@dataclass(frozen=True)
class Offset:
    """``ns`` is added to the node's times; that is wrong by ``bound`` at most, while the clocks drift as they did."""

    ns: int
    bound: int


SAME = Offset(0, 0)  # of a node that shares the coordinator's clock


def offset_of(exchanges: Sequence[Exchange]) -> Offset:
    """Returns the offset by the quickest exchange. Raises ValueError if there is none."""
    best = min(exchanges, key=lambda one: one.came - one.sent)
    return Offset((best.sent + best.came) // 2 - best.told, (best.came - best.sent + 1) // 2)  # a bound is rounded up


def offset_during(before: Sequence[Exchange], after: Sequence[Exchange]) -> Offset:
    """Returns the offset during a time between two series of exchanges. One of them may be empty. The bound covers both
    ends, and so the time between them, in which clocks drift one way.
    """
    if not before or not after:
        return offset_of([*before, *after])
    first, last = offset_of(before), offset_of(after)
    low = min(first.ns - first.bound, last.ns - last.bound)
    high = max(first.ns + first.bound, last.ns + last.bound)
    return Offset((low + high) // 2, (high - low + 1) // 2)
