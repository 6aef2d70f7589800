"""Batches by cost: within the budget, as many on all ranks, each sample once, and balanced."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.torch_api.contrib import TokenBudgetBatchSampler


def samplers(costs, budget, ranks, **options):
    return [
        TokenBudgetBatchSampler(range(len(costs)), costs, budget, num_replicas=ranks, rank=rank, seed=5, **options)
        for rank in range(ranks)
    ]


def price(batch, costs, padded):
    found = [costs[index] for index in batch]
    return max(found) * len(found) if padded else sum(found)


@given(
    costs=st.lists(st.integers(0, 30), min_size=1, max_size=80),
    ranks=st.integers(1, 5),
    budget=st.integers(30, 200),
    padded=st.booleans(),
    shuffle=st.booleans(),
    most=st.sampled_from([None, 1, 4]),
)
@settings(max_examples=150, deadline=None)
def test_each_sample_comes_once_within_the_budget(costs, ranks, budget, padded, shuffle, most):
    made = samplers(costs, budget, ranks, padded=padded, shuffle=shuffle, max_samples=most)
    for epoch in range(2):
        for one in made:
            one.set_epoch(epoch)
        batches = [list(one) for one in made]
        assert {len(mine) for mine in batches} == {len(one) for one in made} == {len(made[0])}
        every = [batch for mine in batches for batch in mine]
        assert all(batch and price(batch, costs, padded) <= budget for batch in every)
        assert most is None or max(map(len, every)) <= most
        used = Counter(index for batch in every for index in batch)
        assert set(used) == set(range(len(costs)))
        if max(used.values()) > 1:  # single samples, too few to fill the first step
            assert sum(used.values()) - len(used) < ranks


@pytest.mark.parametrize("padded", [False, True])
def test_steps_are_balanced_and_batches_full(padded):
    costs = torch.randn(4000, generator=torch.Generator().manual_seed(1)).mul(0.8).exp().mul(50).ceil().clamp_max(800)
    made = samplers(costs, 2000, 4, padded=padded)
    prices = torch.tensor([[price(batch, costs.tolist(), padded) for batch in one] for one in made])
    spread = prices.max(0).values - prices.float().mean(0)
    assert spread.sum() / prices.float().mean(0).sum() < 0.1
    assert prices.float().mean() > 0.8 * 2000
    assert set(map(tuple, made[0])) != (made[0].set_epoch(1) or set(map(tuple, made[0])))


@pytest.mark.parametrize("later", [3, 2, 5])
def test_an_epoch_goes_on_with_other_ranks(later):
    costs = [1 + (7 * index) % 23 for index in range(200)]
    ranks = samplers(costs, 60, 3)
    given_out = [iter(one) for one in ranks]
    used = [index for _ in range(6) for one in given_out for index in next(one)]
    state = json.loads(json.dumps(ranks[2].state_dict()))
    others = samplers(costs, 60, later)
    for one in others:
        one.load_state_dict(state)
    assert len({len(one) for one in others}) == 1
    used += [index for one in others for batch in one for index in batch]
    assert sorted(used) == list(range(200))
    assert sorted(index for one in others for batch in one for index in batch) == list(range(200)), "the next epoch"
