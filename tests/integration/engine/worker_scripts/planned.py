"""Ranks that agree after each step whether a planned generation follows, as the ranks of a training job do."""

from __future__ import annotations

from typing import Any

from worker_scripts.elastic import check
from worker_scripts.rank import Rank, core, say


def boundaries(rank: Rank, count: int) -> dict[str, Any]:
    """Steps until a generation is planned, then the next one. Says each view, after the first result there, and at each
    boundary how many steps there were. A newcomer makes one step in its lobby."""
    rank.view(rank.src, "float32", count)[:] = rank.rank + 1
    result = rank.view(rank.dst, "float32", count)
    while True:
        view = rank.native.view()
        steps, newest = 0, 0
        try:
            while newest <= view["generation"]:
                rank.run("allreduce", count=count)
                check(result, view)
                steps += 1
                if steps == 1:
                    say(view=view)
                if view["newcomer"]:
                    break
                newest = agree(rank)
            say(steps=steps, newest=newest)
        except core.Regrouped as why:
            say(regrouped=str(why))
        try:
            while rank.native.enter(0.01) is None:
                pass
        except core.Dismissed as why:
            return {"dismissed": str(why)}


def agree(rank: Rank) -> int:
    """The newest generation of which any rank knows that it is planned."""
    source, result = (rank.view(segment, "int64", 1, SIDE) for segment in (rank.src, rank.dst))
    source[0] = rank.native.planned()
    rank.run("allreduce", "int64", op="MAX", count=1, src=SIDE, at=(rank.dst.id, SIDE))
    return int(result[0])


SIDE = 2 << 20  # where flags lie in the segments
