"""A fault that changes no membership leaves the same bits: a link breaks, and the same members go on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.limits import SOON_S
from rig.ranks.engine_hosts import Ranks, make_ranks

import bagua.torch_api as bagua
from bagua.torch_api.job.session import current

sys.path.insert(0, str(Path(__file__).parents[1]))

from training_scenarios.support import mlp, seeded, sgd, square, wrap

FOLDER = "BAGUA_TEST_FOLDER"
BREAK_AT, LOOK_AT, STEPS = 4, 12, 16


def rank_train(broken: bool) -> dict[str, Any]:
    """Trains in float32; returns the parameters after each step. ``broken``: the first rank says when, and waits at a
    later step until it is done."""
    bagua.init_process_group()
    member, folder = current().membership.member, Path(os.environ[FOLDER])
    model = seeded(mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    found = []
    for step in range(STEPS):
        if broken and member == 0 and step == BREAK_AT:
            (folder / "now").touch()
        while broken and member == 0 and step == LOOK_AT and not (folder / "done").exists():
            time.sleep(0.005)
        optimizer.zero_grad()
        square(model, member, step).backward()
        optimizer.step()
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    bagua.barrier()
    return {"steps": found, "generation": current().membership.generation}


def train(folder: Path, hosts: list[list[int]], broken: bool) -> list[dict[str, Any]]:
    folder.mkdir()
    with make_ranks(folder) as ranks:
        start(ranks, folder, hosts, broken)
        ranks.wait()
        return [one.result() for one in ranks.started]


def start(ranks: Ranks, folder: Path, hosts: list[list[int]], broken: bool) -> None:
    ranks.start(rank_train, hosts=hosts, elastic=True, environment={FOLDER: str(folder)}, broken=broken)
    if not broken:
        return
    deadline = time.monotonic() + SOON_S
    while not (folder / "now").exists():
        assert time.monotonic() < deadline, "\n".join(one.output for one in ranks.started)
        time.sleep(0.002)
    assert ranks.regrouper is not None
    ranks.regrouper.again()
    (folder / "done").touch()


@pytest.mark.parametrize("hosts", [[[0], [1], [2]], [[0, 1], [2, 3]]], ids=str)
def test_a_broken_link_leaves_the_same_bits(tmp_path: Path, hosts: list[list[int]]) -> None:
    whole = train(tmp_path / "whole", hosts, broken=False)
    broken = train(tmp_path / "broken", hosts, broken=True)
    assert [result["generation"] for result in whole + broken] == [1] * len(whole) + [2] * len(broken)
    for step in range(STEPS):
        bits = {result["steps"][step].numpy().tobytes() for result in whole + broken}
        assert len(bits) == 1, f"step {step}"
