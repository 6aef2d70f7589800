"""Ranks that go on through the generations of an elastic job."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from worker_scripts.rank import Rank, core, say


def check(result: np.ndarray, view: dict[str, Any], comm: list[int] | None = None) -> None:
    """Every rank gives the number of its member and one more."""
    ranks = range(len(view["members"])) if comm is None else comm
    expected = sum(view["members"][rank] + 1 for rank in ranks)
    assert (result == expected).all(), f"{set(result)} is not {expected} in {view}"


def through(rank: Rank, count: int, idle: bool = False) -> dict[str, Any]:
    """All-reduces without end. Says each view that it enters, after the first result there, and each end.

    ``idle``: member 1 waits before the second operation of each generation, so that all others wait for it.
    """
    member = rank.rank
    rank.view(rank.src, "float32", count)[:] = member + 1
    result = rank.view(rank.dst, "float32", count)
    view = rank.native.view()
    while True:
        try:
            rank.run("allreduce", count=count)
            check(result, view)
            say(view=view, at=time.monotonic())
            if idle and member == 1:
                time.sleep(1000)
            while True:
                rank.run("allreduce", count=count, label="bucket 1")
                check(result, view)
        except core.Regrouped as why:
            say(regrouped=str(why), at=time.monotonic())
        entered = rank.native.enter(60.0)
        assert entered is not None and entered == rank.native.view()
        assert entered["members"][entered["rank"]] == member and entered["generation"] > view["generation"]
        view = entered
