"""Elastic jobs with sparse gradients: a rank is killed, and the others hold the same bits."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from rig.ranks.engine_hosts import Ranks
from rig.ranks.faults import kill_self

import bagua.torch_api as bagua
from bagua.torch_api.job.session import current
from bagua.torch_api.train.sparse_gradients import SparseGradients

sys.path.insert(0, str(Path(__file__).parents[1]))

from training_scenarios.sparse import Tables, sgd
from training_scenarios.support import seeded, wrap

STEPS = 5


def rank_train(moment: str, bare: bool) -> list[torch.Tensor]:
    """Parameters after each step. Member 1 is killed in the third one: "before" its sparse gradients are exchanged,
    when the buckets have been, or "behind"."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(lambda: Tables(bare=bare))
    optimizer = sgd(model)
    wrap(model, optimizer)
    results_of, step, found = SparseGradients._means, 0, []

    def results(self: SparseGradients) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        if (moment, member, step) == ("before", 1, 2):
            kill_self()
        whole = results_of(self)
        if (moment, member, step) == ("behind", 1, 2):
            kill_self()
        return whole

    SparseGradients._means = results  # type: ignore[method-assign]
    for step in range(STEPS):
        optimizer.zero_grad()
        if not bare:
            model(member, step).backward()
        (model.first(torch.tensor([step, member])).sum() * 0.1).backward()
        optimizer.step()
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    bagua.barrier()
    return found


@pytest.mark.parametrize("bare", [False, True], ids=["with buckets", "alone"])
@pytest.mark.parametrize("moment", ["before", "behind"])
def test_survivors_hold_the_same(ranks: Ranks, moment: str, bare: bool) -> None:
    started = ranks.start(rank_train, 3, elastic=True, moment=moment, bare=bare)
    ranks.wait()
    assert started[1].process.returncode == -9, started[1].output
    first, other = started[0].result(), started[2].result()
    assert len(first) == STEPS and all(map(torch.equal, first, other))
    assert not any(torch.equal(one, then) for one, then in itertools.pairwise(first))
