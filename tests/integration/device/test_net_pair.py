"""The two ranks in one process of ``tests/gpu``'s section ``net_pair``, over the fakes of CUDA and NCCL."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path

import pytest
from gpu import net_pair
from gpu.net_pair_ranks import RANKS, Pair, measure
from rig.limits import SOON_S

TESTS = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def test_two_ranks_in_one_process() -> None:
    found, _ = net_pair.one_turn(TESTS, "fake", [1024, 65536], 30)
    assert found["right"] and not found["stopped"]
    assert sorted(found["seconds"]) == [1024, 65536]
    assert all(0 < seconds < SOON_S for seconds in found["seconds"].values())


def test_what_nccl_says_is_told() -> None:
    with pytest.raises(RuntimeError, match="ncclCommInitRank: unhandled system error"):
        net_pair.one_turn(TESTS | {"FAKE_NCCL_NO_INIT": "1"}, "fake", [1024], 30)


def test_ranks_that_fail_or_do_not_come_are_named() -> None:
    pair = types.SimpleNamespace(
        card=types.SimpleNamespace(here=lambda: None), _meet=threading.Barrier(RANKS), both=Pair.both
    )
    assert pair.both(pair, lambda rank: rank + 10, 10) == [10, 11]
    over = threading.Event()
    with pytest.raises(RuntimeError, match="rank 1 is not over after 0 s"):
        pair.both(pair, lambda rank: rank == 0 or over.wait(60), 0.3)
    over.set()

    def fails(rank: int) -> None:
        if rank == 0:
            raise RuntimeError("ncclAllReduce: no network")

    with pytest.raises(RuntimeError, match="rank 0: ncclAllReduce: no network"):
        pair.both(pair, fails, 10)


def test_what_was_measured_is_kept() -> None:
    def seconds(data: list[int], count: int, repeats: int, limit_s: float) -> float:
        if count > 256:
            raise RuntimeError("rank 1 is not over after 9 s")
        return 1e-3

    pair = types.SimpleNamespace(card=types.SimpleNamespace(put=lambda array: 0), seconds=seconds)
    assert measure(pair, [1024, 2048], time.monotonic() + 60) == (
        {1024: 1e-3},
        "2048 B: rank 1 is not over after 9 s",
    )
