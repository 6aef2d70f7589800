"""Elastic jobs: ranks are killed, and the others go on. Results are those of one process with the same members."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.engine_hosts import Ranks
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.join.session import current

sys.path.insert(0, str(Path(__file__).parent))

from faults import VARIABLE, Fault
from training_scenarios.support import seeded, sgd, wide_mlp, wide_square, wrap

STEPS = 5


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def rank_train(average: bool = True) -> dict[str, Any]:
    """Trains; returns parameters and world size after each step."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer, average=average)
    fault = Fault(lambda: model.bagua_buckets)
    found = []
    for step in range(STEPS):
        fault.step = step
        optimizer.zero_grad()
        fault.at("before")
        wide_square(model, member, step).backward()
        fault.at("committed")
        optimizer.step()
        found.append(flat(model))
    bagua.barrier()
    return {"member": member, "steps": found, "place": (bagua.get_world_size(), bagua.get_rank())}


def reference(members_of: list[list[int]], average: bool = True) -> list[torch.Tensor]:
    """Parameters after each step of one process that has the batches of these members."""
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    found = []
    for step, members in enumerate(members_of):
        optimizer.zero_grad()
        scale = len(members) if average else 1
        sum(wide_square(model, member, step) / scale for member in members).backward()
        optimizer.step()
        found.append(flat(model))
    return found


@dataclass(frozen=True)
class Kill:
    """See faults.py."""

    member: int
    step: int
    bucket: int
    phase: str

    def counts_from(self) -> list[int]:
        """The first step without the member: one of these."""
        return {"committed": [self.step + 1], "flags": [self.step, self.step + 1]}.get(self.phase, [self.step])


def references(members: int, kills: list[Kill], average: bool) -> list[list[torch.Tensor]]:
    """Parameters after each step, for all that may have happened."""
    found = []
    for firsts in itertools.product(*(kill.counts_from() for kill in kills)):
        gone = {kill.member: first for kill, first in zip(kills, firsts, strict=True)}
        by_step = [[m for m in range(members) if gone.get(m, STEPS) > step] for step in range(STEPS)]
        found.append(reference(by_step, average))
    return found


def check_survivors(ranks: Ranks, kills: list[Kill], average: bool = True) -> None:
    """All but those that were killed ended well, with the same bits, and those of a reference but for rounding."""
    killed = {kill.member for kill in kills}
    for one in ranks.started:
        if one.rank in killed:
            assert one.process.returncode == -9, one.output
    results = [one.result() for one in ranks.started if one.rank not in killed]
    for result in results[1:]:
        for mine, first in zip(result["steps"], results[0]["steps"], strict=True):
            assert torch.equal(mine, first)
    found = results[0]["steps"]
    wanted = references(len(ranks.started), kills, average)
    assert any(
        all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(found, steps, strict=True))
        for steps in wanted
    ), [(one - other).abs().max() for one, other in zip(found, wanted[0], strict=True)]
    left = sorted({one.rank for one in ranks.started} - killed)
    for result in results:
        assert result["place"] == (len(left), left.index(result["member"]))


JOBS = [
    [Kill(4, 1, 0, "before"), Kill(0, 2, 1, "bucket"), Kill(2, 3, 0, "submitted")],
    [Kill(0, 0, 0, "ready"), Kill(3, 2, 0, "flags"), Kill(1, 4, 0, "committed")],
    [Kill(2, 0, 0, "submitted"), Kill(0, 1, 0, "committed"), Kill(3, 3, 2, "bucket")],
    [Kill(1, 0, 1, "bucket"), Kill(2, 1, 0, "flags"), Kill(0, 3, 0, "ready")],
]


@pytest.mark.parametrize("kills", JOBS, ids=lambda kills: " ".join(kill.phase for kill in kills))
def test_the_others_go_on_when_ranks_are_killed(ranks: Ranks, kills: list[Kill]) -> None:
    """No step is lost or done twice: a step counts with all members, or again with those that are left."""
    told = " ".join(f"{kill.member}:{kill.step}:{kill.bucket}:{kill.phase}" for kill in kills)
    ranks.start(rank_train, nprocs=5, elastic=True, environment={VARIABLE: told, "BAGUA_DEFAULT_BUCKET_SIZE": "3000"})
    ranks.wait(90.0)
    check_survivors(ranks, kills)
