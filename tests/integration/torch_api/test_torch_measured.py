"""Costs that ranks learn from their steps: each measures its own work, and all have the same costs afterwards."""

import time
from pathlib import Path

import torch
from rig.files import await_file
from torch.utils.data import DataLoader
from training_scenarios.support import seeded, sgd, wide_mlp, wrap

import bagua.torch_api as bagua
from bagua.torch_api.contrib import LoadBalancingDistributedSampler
from bagua.torch_api.data.measured import own_time

SAMPLES = 48
SLOW = 40
"""Samples from this one on take 20 ms each, the others 1, by a clock that counts only that."""


def rank_learn():
    worked = [0.0]
    sampler = LoadBalancingDistributedSampler(list(range(SAMPLES)), "measured")
    loader = DataLoader(list(range(SAMPLES)), 1, sampler=sampler)
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in sampler.timed(loader, lambda: worked[0]):
            optimizer.zero_grad()
            worked[0] += 0.02 if int(batch) >= SLOW else 0.001
            model(torch.zeros(1, 10, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
    sampler.set_epoch(2)
    return sampler.costs, list(sampler)


def test_ranks_learn_the_same_costs(pools):
    (costs, first), (other, second) = pools([0, 1]).run(rank_learn)
    assert torch.equal(costs, other)
    assert torch.allclose(costs, torch.where(torch.arange(SAMPLES) < SLOW, 1e3, 2e4).double())
    together = sum((one >= SLOW) == (two >= SLOW) for one, two in zip(first, second, strict=True))
    assert together == SAMPLES // 2 and sorted(first + second) == list(range(SAMPLES))


def rank_wait(folder):
    """Rank 1 comes late to the exchange. Returns the seconds that passed, and those of this rank's own work."""
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    model(torch.zeros(1, 10, dtype=torch.float64)).square().mean().backward()  # the first one agrees on buckets
    loss = model(torch.zeros(1, 10, dtype=torch.float64)).square().mean()
    bagua.barrier()
    own, began = own_time(), time.perf_counter()
    worked = own()
    if bagua.get_rank() == 1:
        await_file(Path(folder, "waits"))
        time.sleep(0.1)
    Path(folder, "waits").touch()
    loss.backward()
    return time.perf_counter() - began, own() - worked


def test_a_rank_that_waits_for_others_does_not_count_that(pools, tmp_path):
    (passed, worked), _ = pools([0, 1]).run(rank_wait, folder=str(tmp_path))
    assert 0 <= worked < passed - 0.01
