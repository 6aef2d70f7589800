"""Samplers that balance the load: the original's samples, equal lengths, epochs that go on, and bad input."""

import json
import math
import random
from collections import Counter
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)


def original(costs, ranks, epoch, level, shuffle, drop_last):
    """Samples of each rank as the original gives them, written down plainly."""
    length = len(costs)
    each = length // ranks if drop_last else math.ceil(length / ranks)
    generator = torch.Generator()
    generator.manual_seed(3 + epoch)
    noisy = list(costs)
    if shuffle:
        noise = torch.randint(int((max(costs) - min(costs)) * level + 1), (length,), generator=generator).tolist()
        noisy = [cost + more for cost, more in zip(costs, noise, strict=True)]
    order = sorted(range(length), key=lambda index: noisy[index])
    chunks = [[order[(chunk * ranks + rank) % length] for rank in range(ranks)] for chunk in range(each)]
    turns = torch.randperm(each, generator=generator).tolist() if shuffle else range(each)
    return [[chunks[turn][rank] for turn in turns] for rank in range(ranks)]


def samplers(costs, ranks, **options):
    return [
        LoadBalancingDistributedSampler(range(len(costs)), lambda i: costs[i], ranks, rank, seed=3, **options)
        for rank in range(ranks)
    ]


@given(
    costs=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 6),
    epoch=st.integers(0, 3),
    level=st.sampled_from([0.0, 0.3, 1.0]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_same_samples_as_the_original(costs, ranks, epoch, level, shuffle, drop_last):
    made = samplers(costs, ranks, random_level=level, shuffle=shuffle, drop_last=drop_last)
    for one in made:
        one.set_epoch(epoch)
    given_out = [list(one) for one in made]
    assert given_out == original(costs, ranks, epoch, level, shuffle, drop_last)
    assert {len(one) for one in made} == {len(mine) for mine in given_out}
    if len(costs) >= ranks:
        chunks, turns = made[0].shuffle_chunks()
        assert [int(chunks[turn][0]) for turn in turns] == given_out[0]


def test_costs_may_be_given_by_index():
    costs = torch.randint(0, 99, (50,))
    by_function = samplers(costs, 2)
    for given_costs in (costs, costs.tolist(), costs.to(torch.int16)):
        by_index = LoadBalancingDistributedSampler(range(50), given_costs, 2, 1, seed=3)
        assert list(by_index) == list(by_function[1])


# Batches


def pairs_within(budget, costs):
    """Batches of neighbours with at most this sum of costs."""

    def batch_fn(indices):
        batches = [[]]
        for index in indices:
            if sum(costs[other] for other in batches[-1]) + costs[index] > budget and batches[-1]:
                batches.append([])
            batches[-1].append(index)
        return batches

    return batch_fn


def careless(indices):
    """Random batches, without a seed, from a generator."""
    left = list(indices)
    random.shuffle(left)
    while left:
        size = random.randint(1, 5) + int(torch.randint(2, ()))
        yield tuple(left[:size])
        left = left[size:]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["budget", "careless"])
@pytest.mark.parametrize("length", [3, 57])
def test_all_ranks_have_as_many_batches(kind, drop_last, length):
    costs = [1 + (7 * index) % 13 for index in range(length)]
    batch_fn = pairs_within(20, costs) if kind == "budget" else careless
    before = random.getstate(), torch.get_rng_state()
    made = [LoadBalancingDistributedBatchSampler(one, batch_fn, drop_last) for one in samplers(costs, 3)]
    for epoch in range(3):
        for one in made:
            one.set_epoch(epoch)
        batches = [list(one) for one in made]
        assert {len(mine) for mine in batches} == {len(one) for one in made} == {len(made[0])}
        for one, mine, sampler in zip(made, batches, samplers(costs, 3), strict=True):
            sampler.set_epoch(epoch)
            samples = Counter(index for batch in mine for index in batch)
            assert set(samples) <= set(sampler) if drop_last else set(samples) == set(sampler)
            assert one.padded_batches == batches
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


# Resuming


def by_twos(indices):
    return [indices[begin : begin + 2] for begin in range(0, len(indices), 2)]


def make(kind, ranks, rank, length=61):
    costs = [(11 * index) % 17 for index in range(length)]
    sampler = LoadBalancingDistributedSampler(range(length), lambda i: costs[i], ranks, rank, seed=3)
    return sampler if kind == "samples" else LoadBalancingDistributedBatchSampler(sampler, by_twos)


def flat(items):
    return [index for item in items for index in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("kind", ["samples", "batches"])
@pytest.mark.parametrize("later", [[3], [2], [4, 1], [3, 5, 2]])
def test_an_epoch_goes_on_with_other_ranks(kind, later):
    """Those that go on use each sample that was not used; only what fills the last chunks is used twice."""
    ranks = [make(kind, 3, rank) for rank in range(3)]
    whole = [flat(one) for one in ranks]
    for one in ranks:
        one.set_epoch(1)
    used = []
    for number in [*later, 0]:
        given_out = [iter(one) for one in ranks]
        steps = 3 if number else 10**6
        used += flat(item for one in given_out for item in islice(one, steps))
        states = [json.loads(json.dumps(one.state_dict())) for one in ranks]
        assert all(state == states[0] for state in states)
        if number:
            ranks = [make(kind, number, rank) for rank in range(number)]
            for one in ranks:
                one.load_state_dict(states[0])
                one.set_epoch(1)
    counts = Counter(used)
    assert set(counts) == set(range(61)) and sum(counts.values()) <= 61 + 3 * len(later) + 8
    if later == [3]:
        ranks = [make(kind, 3, rank) for rank in range(3)]
        for one in ranks:
            one.set_epoch(1)
        assert sorted(used) == sorted(index for one in ranks for index in flat(one))
    for one in ranks:  # the next epoch is a whole one
        one.set_epoch(0)
    if len(ranks) == 3:
        assert [flat(one) for one in ranks] == whole
    assert set(flat(item for one in ranks for item in one)) == set(range(61))


@pytest.mark.parametrize("kind", ["samples", "batches"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 uses it
def test_torchdata_resumes_it(kind, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader():
        options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        if kind == "samples":
            return stateful.StatefulDataLoader(list(range(61)), 4, sampler=make(kind, 2, 1), **options)
        return stateful.StatefulDataLoader(list(range(61)), batch_sampler=make(kind, 2, 1), **options)

    whole = [batch.tolist() for batch in loader()]
    first = loader()
    begun = iter(first)
    seen = [next(begun).tolist() for _ in range(3)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert seen + [batch.tolist() for batch in second] == whole


# Bad input


@pytest.mark.parametrize(
    ("cost", "error", "words"),
    [
        (lambda i: math.nan if i == 7 else 1, ValueError, "nan for sample 7"),
        (lambda i: -1, ValueError, r"-1.0 for sample 0 \(and 19 more"),
        (lambda i: math.inf, ValueError, "inf for sample 0"),
        (lambda i: "long" if i == 3 else 1, TypeError, "no number for sample 3"),
        (lambda i: None, TypeError, "no number for sample 0"),
        ([1, 2, 3], ValueError, r"shape \[3\], and the dataset has 20 samples"),
        (torch.ones(20, 2), ValueError, r"shape \[20, 2\]"),
        ("lengths", ValueError, 'a function, costs, or "measured"'),
    ],
)
def test_bad_costs(cost, error, words):
    with pytest.raises(error, match=words):
        LoadBalancingDistributedSampler(range(20), cost, 2, 0)
