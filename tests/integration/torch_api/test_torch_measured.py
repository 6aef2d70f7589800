"""Costs that ranks learn from their steps: each measures its own work, and all have the same costs afterwards."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from rig.engine_hosts import Ranks
from torch.utils.data import DataLoader

import bagua.torch_api as bagua
from bagua.torch_api.contrib import LoadBalancingDistributedSampler

sys.path.insert(0, str(Path(__file__).parent))

from training_scenarios.support import seeded, sgd, wide_mlp, wrap

SAMPLES = 48
SLOW = 40
"""Samples from this one on take 20 ms each, the others none: far more than a step takes otherwise."""


def rank_learn() -> tuple[torch.Tensor, list[int]]:
    bagua.init_process_group()
    sampler = LoadBalancingDistributedSampler(list(range(SAMPLES)), "measured")
    loader = DataLoader(list(range(SAMPLES)), 1, sampler=sampler)
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in sampler.timed(loader):
            optimizer.zero_grad()
            time.sleep(0.02 * int((batch >= SLOW).sum()))
            model(torch.zeros(1, 10, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    sampler.set_epoch(2)
    return sampler.costs, list(sampler)


def test_ranks_learn_the_same_costs(ranks: Ranks) -> None:
    (costs, first), (other, second) = ranks.run(rank_learn, 2)
    assert torch.equal(costs, other)
    # A rank that waits for the other one in backward does not count that as its own work.
    assert costs[SLOW:].min() > 2 * costs[:SLOW].median()
    together = sum((one >= SLOW) == (two >= SLOW) for one, two in zip(first, second, strict=True))
    assert together == SAMPLES // 2 and sorted(first + second) == list(range(SAMPLES))
