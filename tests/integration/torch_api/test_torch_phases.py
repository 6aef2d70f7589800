"""Phases of a step have names in torch.profiler, and cost next to nothing where nobody looks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.autograd.profiler
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.torch_api.step import phases

STEPS = 2


def profiled(algorithm: Algorithm) -> list[dict[str, Any]]:
    """Names and times (in µs) of our ranges in STEPS profiled steps of a model."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model = model.with_bagua([optimizer], algorithm)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            step()
    return [
        {"name": event.name, "begin": event.time_range.start, "end": event.time_range.end}
        for event in profile.events()
        if event.name.startswith("bagua:")
    ]


def rank_is_profiled() -> None:
    bagua.init_process_group()
    for name in ("gradient_allreduce", "power_sgd:rank=2"):
        kind, _, rest = name.partition(":")
        settings = {key: int(value) for key, value in [pair.split("=") for pair in rest.split(",") if pair]}
        events = profiled(Algorithm.init(kind, **settings))
        names = [event["name"] for event in events]
        submits = sorted({one for one in names if one.startswith("bagua:submit bucket ")})
        assert len(submits) >= 2, names
        for one in submits:
            assert names.count(one) == STEPS
            assert names.count(one.replace("submit", "wait")) >= STEPS
        assert names.count("bagua:wait") == names.count("bagua:results") == STEPS
        assert any(one.startswith("bagua:plan step bucket ") for one in names) == (kind == "power_sgd")
        for whole in (event for event in events if event["name"] == "bagua:wait"):
            inside = [e for e in events if e["begin"] >= whole["begin"] and e["end"] <= whole["end"] and e is not whole]
            assert sum(e["name"].startswith("bagua:wait bucket") for e in inside) >= len(submits)


def test_the_profiler_shows_phases(ranks: Any) -> None:
    ranks.run(rank_is_profiled, 2, environment={"BAGUA_DEFAULT_BUCKET_SIZE": "40000"})


def test_the_profilers_flag_is_where_it_was() -> None:
    """It is private to torch. Without it each phase costs a record_function in every step."""
    flag = torch.autograd.profiler._is_profiler_enabled
    assert flag is False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert phases.profiling()
    assert not phases.profiling()


def test_phases_are_nothing_where_nobody_looks() -> None:
    assert phases.phase("submit", "0") is phases.NOTHING
    begin = time.perf_counter()
    for _ in range(1000):
        with phases.phase("submit", "0"):
            pass
    assert time.perf_counter() - begin < 1  # a thousand of them: this is no measurement


@pytest.mark.parametrize(("bucket", "name"), [("3", "bucket 3"), ("x" * 60, "bucket " + "x" * 29)])
def test_a_bucket_is_called_as_its_operations_are(bucket: str, name: str) -> None:
    assert phases.bucket_name(bucket) == name
