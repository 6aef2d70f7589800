"""Costs that are learned from the time of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from bagua.base.errors import BaguaError
from bagua.torch_api.contrib import LoadBalancingDistributedSampler

LENGTH = 240


class Clock:
    """Seconds that a rank has worked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lengths() -> torch.Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(2)).exp().mul(40).ceil().double()


def train(sampler: LoadBalancingDistributedSampler, costs: torch.Tensor, size: int, epochs: int) -> None:
    clock = Clock()
    loader = DataLoader(list(range(LENGTH)), size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen: list[int] = []
        for batch in sampler.timed(loader, clock):
            seen += batch.tolist()
            clock.now += float(costs[batch].sum()) * 1e-6
            if epoch == 1 and len(seen) >= LENGTH // 2:
                break
    sampler.set_epoch(epochs)


def spread(sampler: LoadBalancingDistributedSampler, costs: torch.Tensor, size: int, ranks: int) -> float:
    """By how much the slowest of ``ranks`` ranks is above the mean, of all steps together."""
    dealt = sampler._chunks(sampler._order()[0], ranks)
    dealt = dealt[torch.randperm(len(dealt), generator=torch.Generator().manual_seed(0))]
    sums = torch.stack([costs[chunk].sum(0) for chunk in dealt.split(size) if len(chunk) == size])
    return float((sums.max(1).values - sums.mean(1)).sum() / sums.mean(1).sum())


def test_costs_by_size() -> None:
    """A batch's time is that of the tokens and of their attention; one epoch is enough."""
    sizes = lengths()
    costs = 30 + 2 * sizes + 0.05 * sizes**2
    sampler = LoadBalancingDistributedSampler(range(LENGTH), "measured", 1, 0, size_fn=sizes)
    train(sampler, costs, 8, 1)
    assert torch.allclose(sampler.costs, costs, rtol=1e-3)


@pytest.mark.parametrize(("size", "epochs", "gain"), [(1, 2, 10.0), (4, 12, 3.0)])
def test_costs_of_single_samples(size: int, epochs: int, gain: float) -> None:
    costs = lengths()
    sampler = LoadBalancingDistributedSampler(range(LENGTH), "measured", 1, 0)
    before = spread(sampler, costs, size, 4)
    train(sampler, costs, size, epochs)
    assert spread(sampler, costs, size, 4) * gain < before


def test_a_resumed_epoch_is_measured_from_there() -> None:
    costs = lengths()
    sampler = LoadBalancingDistributedSampler(range(LENGTH), "measured", 1, 0)
    state = sampler.state_dict(given=100)
    sampler.load_state_dict(state)
    clock = Clock()
    for batch in sampler.timed(DataLoader(list(range(LENGTH)), 1, sampler=sampler), clock):
        clock.now += float(costs[batch].sum()) * 1e-6
    sampler.set_epoch(1)
    measured = sampler.costs > 0
    assert int(measured.sum()) == LENGTH - 101, "all of the rest but the first"
    assert torch.allclose(sampler.costs[measured], costs[measured])


def test_without_a_measurement_costs_stay() -> None:
    sampler = LoadBalancingDistributedSampler(range(LENGTH), "measured", 2, 1, size_fn=lengths())
    before = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == before and torch.equal(sampler.costs, lengths())


def test_bad_use() -> None:
    known = LoadBalancingDistributedSampler(range(9), float, 1, 0)
    with pytest.raises(ValueError, match='complexity_fn="measured"'):
        known.timed(DataLoader(list(range(9)), sampler=known))
    learning = LoadBalancingDistributedSampler(range(9), "measured", 1, 0)

    def batches() -> Iterator[Any]:
        yield from ()

    with pytest.raises(ValueError, match="batch_size"):
        learning.timed(batches())
    several = LoadBalancingDistributedSampler(range(9), "measured", 2, 0)
    with pytest.raises(BaguaError, match="init_process_group"):
        several.timed(DataLoader(list(range(9)), sampler=several))
