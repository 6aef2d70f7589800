"""Buckets that are cut anew between two steps: every element keeps its state, bit by bit."""

import pytest
import torch
from training_scenarios.support import check_identical, mlp, seeded, sgd, square

import bagua.torch_api as bagua
from bagua.algorithms import Codec
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.one_bit_adam import OneBitAdamOptimizer
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.contrib import fuse_optimizer

STEPS = 9
HOSTS = {"one host": [[0, 1]], "two hosts": [[0], [1]], "two hosts of two": [[0, 1], [2, 3]]}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def q_adam(model):
    return QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)


def one_bit_adam(model):
    return OneBitAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)


def fused(model):
    return fuse_optimizer(adam(model))


# Name -> (algorithm, its arguments, optimizer, arithmetic does not depend on cuts, replicas are the same)
CASES = {
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


def cut_each(cuts):
    """A bucket for each parameter."""
    return [[name] for names in cuts for name in names]


def cut_together(cuts):
    return [[name for names in cuts for name in names]]


def train(case, *cutters):
    """Weights after all steps. ``cutters``: how buckets are cut, one after the other, before the fifth step, from how
    they were cut until then."""
    name, arguments, make, _, _ = CASES[case]
    model = seeded(mlp)
    optimizer = make(model)
    model.with_bagua([optimizer], Algorithm.init(name, **arguments))
    ddp = model.bagua_ddp
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


def rank_cuts(cases):
    return {case: [train(case), train(case, cut_each, cut_together, list), train(case, cut_each)] for case in cases}


SAMPLE = ["gradients", "fused", "onebit", "onebit everywhere", "diloco", "neighbours"]


@pytest.mark.parametrize(
    ("layout", "cases"),
    [("two hosts", SAMPLE), *(pytest.param(layout, list(CASES), marks=pytest.mark.full) for layout in HOSTS)],
)
def test_state_is_kept(pools, layout, cases):
    """Back at the first cuts, weights are as if there had been no others; without going back, too, where arithmetic
    does not depend on cuts."""
    for result in pools(*HOSTS[layout]).run(rank_cuts, cases=cases):
        for case, (never, back, cut) in result.items():
            for number, (one, other) in enumerate(zip(never, back, strict=True)):
                assert torch.equal(one, other), f"{case}: parameter {number}"
            for number, (one, other) in enumerate(zip(never, cut, strict=True)):
                assert not CASES[case][3] or torch.equal(one, other), f"{case}: parameter {number}"
