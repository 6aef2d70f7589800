"""Versions of the protocol between coordinator and node daemons, and which of them fit together.

The number goes up with each minor version of Bagua. One that is older by one must be understood on both sides, so that
coordinator and daemons are upgraded one after the other, in either order. What ranks, daemons and hosts of a job say to
each other has a number of its own (csrc/wire_version.py).
"""

from __future__ import annotations

# Protocol of this version. 1: bagua 0.1, which does not say a number; 2: bagua 1.0.
PROTOCOL = 2
OLDEST = 1  # with which this version talks
MAX_PATIENCE_S = 7 * 86_400.0  # the most that LocalJob.patience_s and RunJob.patience_s may be


def misfit(version: str, protocol: int, oldest: int, whose: str) -> str:
    """Says why this process and ``whose`` ("the coordinator", "the daemon on node a") can't talk, in words that say
    what to upgrade; empty: they can. ``version``, ``protocol`` and ``oldest`` are those of the other one; 0: it said
    none.
    """
    protocol, oldest = protocol or 1, oldest or 1  # 0.1 says no number
    if protocol < OLDEST:
        return (
            f"{whose} has bagua {version or '0.1'} (protocol {protocol}), which is too old for this one (protocol "
            f"{PROTOCOL}, from {OLDEST} on): upgrade it by one minor version after the other."
        )
    if oldest > PROTOCOL:
        return (
            f"{whose} has bagua {version or 'unknown'} (protocol {protocol}, from {oldest} on), which is too new for "
            f"this one (protocol {PROTOCOL}): upgrade this one first, by one minor version after the other."
        )
    return ""
