"""Thousands of calls: the last ones cost the engine what the first ones did."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rig.ranks.engine_hosts import Ranks

CALLS = 1000
WAIT_S = 200.0


def rank_exchanges(folder: str) -> None:
    """Tells of the beginning and the end of the first and of the last calls."""
    import bagua.c10d  # noqa: F401

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("bagua", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    given, taken = torch.ones(8), torch.empty(8)
    dist.all_to_all_single(taken, given)
    for calls in (0, CALLS, 4 * CALLS, CALLS):
        for _ in range(calls):
            dist.all_to_all_single(taken, given)
        if rank == 0:
            with (Path(folder) / "marks").open("a") as marks:
                marks.write(".")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", [[[0, 1]], [[0], [1]]], ids=["one host", "two hosts"])
def test_every_all_to_all_costs_the_engine_the_same(hosts: list[list[int]], ranks: Ranks, tmp_path: Path) -> None:
    """Each takes a new tag. The engine, which is in this process, looked through all that had been there."""
    ranks.start(rank_exchanges, hosts=hosts, folder=str(tmp_path))
    marks, spent = tmp_path / "marks", []  # CPU seconds so far, by mark
    end = time.monotonic() + WAIT_S
    while any(rank.process.poll() is None for rank in ranks.started) and time.monotonic() < end:
        seen = marks.stat().st_size if marks.exists() else 0
        spent += [time.process_time()] * (seen - len(spent))
        time.sleep(0.005)
    ranks.wait(1)
    assert [rank.process.returncode for rank in ranks.started] == [0, 0], [rank.output for rank in ranks.started]
    first, last = spent[1] - spent[0], spent[3] - spent[2]
    assert last < 4 * first, (first, last)
