"""Phases of a step have names in torch.profiler."""

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm

STEPS = 2


def profiled(algorithm):
    """Names and times (in µs) of our ranges in STEPS profiled steps of a model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model = model.with_bagua([optimizer], algorithm)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            step()
    return [event for event in profile.events() if event.name.startswith("bagua:")]


def rank_is_profiled():
    bagua.init_process_group()
    for kind, settings in (("gradient_allreduce", {}), ("power_sgd", {"rank": 2})):
        events = profiled(Algorithm.init(kind, **settings))
        names = [event.name for event in events]
        submits = sorted({one for one in names if one.startswith("bagua:submit bucket ")})
        assert len(submits) >= 2, names
        for one in submits:
            assert names.count(one) == STEPS
            assert names.count(one.replace("submit", "wait")) >= STEPS
        assert names.count("bagua:wait") == names.count("bagua:results") == STEPS
        assert any(one.startswith("bagua:plan step bucket ") for one in names) == (kind == "power_sgd")
        for whole in (event.time_range for event in events if event.name == "bagua:wait"):
            waits = [one.time_range for one in events if one.name.startswith("bagua:wait bucket")]
            assert sum(one.start >= whole.start and one.end <= whole.end for one in waits) >= len(submits)


def test_the_profiler_shows_phases(ranks):
    ranks.run(rank_is_profiled, 2, environment={"BAGUA_DEFAULT_BUCKET_SIZE": "40000"})
