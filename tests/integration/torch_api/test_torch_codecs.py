"""Training with gradients that cross between hosts encoded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import bagua.torch_api as bagua
from bagua.algorithms import Codec
from bagua.examples.digits import accuracy, load_digits
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.communication import statistics

sys.path.insert(0, str(Path(__file__).parent))

from training_scenarios.support import batch, check_identical, seeded

LAYOUTS = {"2 hosts, 1 rank each": [[0], [1]], "2 hosts, 2 ranks each": [[0, 1], [2, 3]]}
# Name -> (codec, bytes between hosts for each byte in full precision, at most).
CODECS = {
    "none": ("none", 1.01),
    "fp16": ("fp16", 0.55),
    "bf16": ("bf16", 0.55),
    "fp8_e4m3": ("fp8_e4m3", 0.3),
    "fp8_e5m2": ("fp8_e5m2", 0.3),
    "minmax8": ("minmax8", 0.3),
    "int4": ("int4", 0.2),
    "onebit": ("onebit", 0.1),
    "topk": (Codec("topk", density=0.1), 0.25),
}


def digits_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def train_digits(codec: Codec | str, steps: int = 150) -> dict[str, float]:
    """Accuracy on held-out digits, and bytes that this host sent."""
    train, test = load_digits()
    images, labels = train.tensors
    model = seeded(digits_net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model.with_bagua([optimizer], Algorithm.init("gradient_allreduce", codec=codec))
    generator = torch.Generator().manual_seed(1)
    share = 64 // bagua.get_world_size()
    mine = slice(bagua.get_rank() * share, (bagua.get_rank() + 1) * share)
    before = statistics().bytes_sent
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(labels), (64,), generator=generator)[mine]
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    bagua.barrier()
    sent = statistics().bytes_sent - before
    check_identical(model)
    model.bagua_ddp.close()
    return {"accuracy": accuracy(model, test), "sent": sent}


def rank_digits() -> dict[str, dict[str, float]]:
    bagua.init_process_group()
    return {name: train_digits(codec) for name, (codec, _) in CODECS.items()}


@pytest.fixture(
    scope="module",
    params=["2 hosts, 1 rank each", pytest.param("2 hosts, 2 ranks each", marks=pytest.mark.full)],
)
def trained(request: Any, tmp_path_factory: Any, make_ranks: Any) -> list[dict[str, dict[str, float]]]:
    """The findings of every rank with every codec."""
    with make_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        ranks.start(rank_digits, hosts=LAYOUTS[request.param])
        ranks.wait(deadline_s=200.0)
        return [rank.result() for rank in ranks.started]


@pytest.mark.parametrize("name", CODECS)
def test_accuracy_and_bytes(trained: list[dict[str, dict[str, float]]], name: str) -> None:
    for found in trained:
        full = found["none"]
        assert full["accuracy"] > 0.9
        assert found[name]["accuracy"] >= full["accuracy"] - 0.03
        assert found[name]["sent"] <= CODECS[name][1] * full["sent"]


def mean_result(codec: Codec, steps: int = 40) -> torch.Tensor:
    """Mean over steps of the reduced gradient, where every rank's gradient is the same in all steps. Each step
    synchronises only the second of two passes."""
    model = seeded(lambda: nn.Linear(64, 64, bias=False))
    model.with_bagua([], Algorithm.init("gradient_allreduce", codec=codec))
    mine = batch(bagua.get_rank(), 0, 64, 64)
    total = torch.zeros(64, 64)
    for _ in range(steps):
        model.zero_grad()
        with model.bagua_ddp.no_sync():
            (model.weight * mine).sum().backward()
        (model.weight * mine).sum().backward()
        total += model.weight.grad
    return total / steps


def rank_feedback() -> dict[str, tuple[float, float]]:
    """Mean error of the mean result, with and without feedback."""
    bagua.init_process_group()
    wanted = 2 * torch.stack([batch(rank, 0, 64, 64) for rank in range(bagua.get_world_size())]).mean(0)
    found = {}
    for name, density in (("int4", None), ("onebit", None), ("topk", 0.25), ("minmax8", None)):
        errors = [(mean_result(Codec(name, density, use)) - wanted).abs().mean().item() for use in (True, False)]
        found[name] = (errors[0], errors[1])
    return found


def test_error_feedback_lives_over_steps_and_passes_without_synchronisation(ranks: Any) -> None:
    for found in ranks.run(rank_feedback, hosts=[[0], [1, 2]]):
        for name, (fed_back, lost) in found.items():
            assert fed_back < 0.35 * lost, (name, fed_back, lost)


class Mixed(nn.Module):
    """Layers of two dtypes, a branch that some ranks use, one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(10, 40, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.branches[number](self.wide(x.double()).float())


def rank_mixed() -> list[bool]:
    bagua.init_process_group()
    rank, n = bagua.get_rank(), bagua.get_world_size()

    def loss(model: nn.Module, other: int) -> torch.Tensor:
        return model(batch(other, 0, 6, 10), other % 2).square().mean()

    reference, model = seeded(Mixed), seeded(Mixed)
    model.with_bagua([], Algorithm.init("gradient_allreduce", codec="minmax8"))
    for _ in range(2):
        model.zero_grad()
        loss(model, rank).backward()
    (sum(loss(reference, other) for other in range(n)) / n).backward()
    assert model.branches[2].weight.grad is None  # presence travels exactly
    for name in ("wide", "branches.0", "branches.1"):
        mine, wanted = model.get_submodule(name).weight.grad, reference.get_submodule(name).weight.grad
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12 if name == "wide" else 0.02 * wanted.abs().max())
    exact = (model.wide.weight.grad - reference.wide.weight.grad).abs().max() < 1e-12
    return [bool(exact)]


def test_other_dtypes_and_presence_travel_as_they_are(ranks: Any) -> None:
    assert ranks.run(rank_mixed, hosts=[[0], [1]], environment={"BAGUA_DEFAULT_BUCKET_SIZE": "20000"}) == [[True]] * 2
