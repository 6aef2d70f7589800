"""Costs that are learned from the time of batches."""

import pytest
import torch
from torch.utils.data import DataLoader

from bagua.torch_api.contrib import LoadBalancingDistributedSampler

LENGTH = 240


class Clock:
    """Seconds that a rank has worked."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lengths():
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(2)).exp().mul(40).ceil().double()


def train(sampler, costs, size, epochs):
    clock = Clock()
    loader = DataLoader(list(range(LENGTH)), size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen = []
        for batch in sampler.timed(loader, clock):
            seen += batch.tolist()
            clock.now += float(costs[batch].sum()) * 1e-6
            if epoch == 1 and len(seen) >= LENGTH // 2:
                break
    sampler.set_epoch(epochs)


def spread(sampler, costs, size, ranks):
    """By how much the slowest of ``ranks`` ranks is above the mean, of all steps together."""
    dealt = sampler._chunks(sampler._order()[0], ranks)
    dealt = dealt[torch.randperm(len(dealt), generator=torch.Generator().manual_seed(0))]
    sums = torch.stack([costs[chunk].sum(0) for chunk in dealt.split(size) if len(chunk) == size])
    return float((sums.max(1).values - sums.mean(1)).sum() / sums.mean(1).sum())


def test_costs_by_size():
    """A batch's time is that of the tokens and of their attention; one epoch is enough."""
    sizes = lengths()
    costs = 30 + 2 * sizes + 0.05 * sizes**2
    sampler = LoadBalancingDistributedSampler(range(LENGTH), "measured", 1, 0, size_fn=sizes)
    train(sampler, costs, 8, 1)
    assert torch.allclose(sampler.costs, costs, rtol=1e-3)


@pytest.mark.parametrize(("size", "epochs", "gain"), [(1, 2, 10.0), (4, 12, 3.0)])
def test_costs_of_single_samples(size, epochs, gain):
    costs = lengths()
    sampler = LoadBalancingDistributedSampler(range(LENGTH), "measured", 1, 0)
    before = spread(sampler, costs, size, 4)
    train(sampler, costs, size, epochs)
    assert spread(sampler, costs, size, 4) * gain < before
