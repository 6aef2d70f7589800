"""Buckets that are cut anew between two steps: every element keeps its state, bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.ranks.engine_hosts import Ranks
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Codec
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.one_bit_adam import OneBitAdamOptimizer
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.contrib import fuse_optimizer

sys.path.insert(0, str(Path(__file__).parent))

from training_scenarios.support import check_identical, mlp, seeded, sgd, square

STEPS = 9
HOSTS = {"one host": [[0, 1]], "two hosts": [[0], [1]], "two hosts of two": [[0, 1], [2, 3]]}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def q_adam(model: nn.Module) -> torch.optim.Optimizer:
    return QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)


def one_bit_adam(model: nn.Module) -> torch.optim.Optimizer:
    return OneBitAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return fuse_optimizer(adam(model))


# Name -> (algorithm, its arguments, optimizer, arithmetic does not depend on cuts, replicas are the same)
CASES: dict[str, tuple[str, dict[str, Any], Callable[[nn.Module], torch.optim.Optimizer], bool, bool]] = {
    "gradients": ("gradient_allreduce", {}, sgd, True, True),
    "sum": ("gradient_allreduce", {"average": False}, adam, True, True),
    "fused": ("gradient_allreduce", {}, fused, True, True),
    "onebit": ("gradient_allreduce", {"codec": Codec("onebit", error_feedback=True)}, sgd, False, True),
    "onebit everywhere": ("gradient_allreduce", {"codec": "onebit", "everywhere": True}, sgd, False, True),
    "top_k": ("top_k", {"density": 0.1}, sgd, False, True),
    "power_sgd": ("power_sgd", {"rank": 1}, sgd, True, True),
    "qadam": ("qadam", {"codec": "onebit"}, q_adam, False, True),
    "one_bit_adam": ("one_bit_adam", {}, one_bit_adam, False, True),
    "diloco": ("diloco", {"interval": 2, "codec": "onebit"}, sgd, False, False),
    "neighbours": ("low_precision_decentralized", {"hierarchical": False}, sgd, False, False),
}


def cut_each(cuts: list[list[str]]) -> list[list[str]]:
    """A bucket for each parameter."""
    return [[name] for names in cuts for name in names]


def cut_together(cuts: list[list[str]]) -> list[list[str]]:
    return [[name for names in cuts for name in names]]


def train(case: str, *cutters: Callable[[list[list[str]]], list[list[str]]]) -> list[torch.Tensor]:
    """Weights after all steps. ``cutters``: how buckets are cut, one after the other, before the fifth step, from how
    they were cut until then."""
    name, arguments, make, _, _ = CASES[case]
    model = seeded(mlp)
    optimizer = make(model)
    model.with_bagua([optimizer], Algorithm.init(name, **arguments))
    ddp: Any = model.bagua_ddp
    for step in range(STEPS):
        if step == 5:
            before = [list(bucket.names) for bucket in ddp.bagua_buckets]
            for cutter in cutters:
                assert ddp.recut(cutter(before))
                assert [list(bucket.names) for bucket in ddp.bagua_buckets] == cutter(before)
        optimizer.zero_grad()
        square(model, bagua.get_rank(), step).backward()
        optimizer.step()
    bagua.barrier()
    found = [parameter.detach().clone() for parameter in model.parameters()]
    if CASES[case][4]:
        check_identical(model)
    ddp.close()
    return found


def rank_cuts(cases: list[str]) -> dict[str, list[list[torch.Tensor]]]:
    bagua.init_process_group()
    return {case: [train(case), train(case, cut_each, cut_together, list), train(case, cut_each)] for case in cases}


SAMPLE = ["gradients", "fused", "onebit", "onebit everywhere", "diloco", "neighbours"]


@pytest.mark.parametrize(
    ("layout", "cases"),
    [("two hosts", SAMPLE), *(pytest.param(layout, list(CASES), marks=pytest.mark.full) for layout in HOSTS)],
)
def test_state_is_kept(ranks: Ranks, layout: str, cases: list[str]) -> None:
    """Back at the first cuts, weights are as if there had been no others; without going back, too, where arithmetic
    does not depend on cuts."""
    for result in ranks.run(rank_cuts, hosts=HOSTS[layout], cases=cases):
        for case, (never, back, cut) in result.items():
            for number, (one, other) in enumerate(zip(never, back, strict=True)):
                assert torch.equal(one, other), f"{case}: parameter {number}"
            for number, (one, other) in enumerate(zip(never, cut, strict=True)):
                assert not CASES[case][3] or torch.equal(one, other), f"{case}: parameter {number}"
