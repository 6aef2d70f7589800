"""Says in words what a job's steps wait for, from the averages that its ranks report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.base.islands import rank_name

STRAGGLES = 1.1  # a rank that computes so many times as long as the rank in the middle is named
LEAST_SHARE = 0.01  # Shares below it are left out


@dataclass(frozen=True)
class StepShare:
    """Averages of one rank, in ms of a step. ``compute``: its own work. ``ranks``: it waits for ranks of its host.
    ``exposed``: it waits while an exchange runs, most of all for number ``exchange`` of ``exchanges`` in the step."""

    rank: int
    node: str
    compute: float
    ranks: float
    exposed: float
    exchange: int = 0
    exchanges: int = 0

    @property
    def step(self) -> float:
        return self.compute + self.ranks + self.exposed

    @property
    def waits(self) -> float:
        return self.ranks + self.exposed


def straggler(shares: Sequence[StepShare]) -> StepShare | None:
    """The rank that computes longest, if that is clearly longer than the one in the middle."""
    if len(shares) < 2:
        return None
    slowest = max(shares, key=lambda one: one.compute)
    # The slowest one's own time must not raise the bound.
    others = [one.compute for one in shares if one is not slowest]
    return slowest if slowest.compute > STRAGGLES * statistics.median(others) else None


def step_words(shares: Sequence[StepShare], island_size: int = 1) -> str:
    """Says in one line what the average step consists of. Empty if there is nothing to tell.

    "83 % computation, 12 % waiting for host b's bytes (exchange 3 of 7), 5 % waiting for rank 2"
    """
    total = sum(one.step for one in shares)
    if total <= 0:
        return ""
    slowest = straggler(shares)
    # A rank that is done sooner waits for the slowest one, on whichever host. What it waits beyond that is for bytes.
    behind = {one.rank: min(one.waits, slowest.compute - one.compute) if slowest else 0.0 for one in shares}
    beyond = {one.rank: one.waits - behind[one.rank] for one in shares}
    parts = [(sum(one.compute for one in shares), "computation")]
    if len({one.node for one in shares}) > 1:
        parts.append((sum(beyond.values()), f"waiting for {_whose(shares, beyond)}{_exchange(shares, beyond)}"))
    else:
        for_ranks = sum(min(one.ranks, beyond[one.rank]) for one in shares)
        parts.append((for_ranks, "waiting for ranks of the host that are late by turns"))
        parts.append((sum(beyond.values()) - for_ranks, f"waiting for the exchange{_exchange(shares, beyond)}"))
    if slowest is not None:
        parts.append((sum(behind.values()), f"waiting for {rank_name(slowest.rank, island_size)}"))
    return ", ".join(f"{100 * part / total:.0f} % {words}" for part, words in parts if part / total >= LEAST_SHARE)


def _whose(shares: Sequence[StepShare], beyond: dict[int, float]) -> str:
    """Names the one of two hosts whose bytes are waited for more than twice as long."""
    nodes = sorted({one.node for one in shares})
    if len(nodes) > 2:
        return "other hosts' bytes"
    first, second = (statistics.mean(beyond[one.rank] for one in shares if one.node == node) for node in nodes)
    if first > 2 * second:
        return f"host {nodes[1]}'s bytes"
    return f"host {nodes[0]}'s bytes" if second > 2 * first else "the other host's bytes"


def _exchange(shares: Sequence[StepShare], beyond: dict[int, float]) -> str:
    """Names the exchange of the rank that waits longest."""
    longest = max(shares, key=lambda one: beyond[one.rank])
    return f" (exchange {longest.exchange} of {longest.exchanges})" if longest.exchanges > 1 else ""


def straggler_words(shares: Sequence[StepShare], island_size: int = 1) -> str:
    """A second line, which names the straggler; empty if there is none."""
    slowest = straggler(shares)
    if slowest is None:
        return ""
    others = statistics.median(one.compute for one in shares if one is not slowest)
    return (
        f"{rank_name(slowest.rank, island_size)} on {slowest.node} computes {slowest.compute:.1f} ms a step, "
        f"the {'other' if len(shares) == 2 else 'others'} {others:.1f} ms"
    )
