"""Checkpoints in the background: a job that goes on from one has the bits of a job that never stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm

WIDTH = 8


class Net(nn.Module):
    """With buffers that differ between ranks, and random numbers of each rank."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4 * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


def optimizer_of(algorithm: str, model: nn.Module) -> torch.optim.Optimizer:
    if algorithm == "q_adam":
        return bagua.algorithms.q_adam.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    if algorithm == "one_bit_adam":
        return bagua.algorithms.one_bit_adam.OneBitAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    found = [tensor.detach().double().flatten() for tensor in [*model.parameters(), *model.buffers()]]
    for parameter in model.parameters():
        found += [one.double().flatten() for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor)]
    return torch.cat([*found, torch.rand(1).double()])


def rank_trains(
    folder: str, steps: int, algorithm: str = "gradient_allreduce", every: int = 3, options: dict[str, Any] | None = None
) -> tuple[int, torch.Tensor]:
    bagua.init_process_group()
    torch.manual_seed(17 + bagua.get_rank())
    model = Net()
    optimizer = optimizer_of(algorithm, model)
    model.with_bagua([optimizer], Algorithm.init(algorithm, **(options or {})))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=every, keep=2, schedulers=[scheduler])
    start = checkpointer.resume()
    while checkpointer.steps < steps:
        optimizer.zero_grad()
        inputs = torch.randn(6, WIDTH)
        model(inputs).sub(inputs).square().mean().backward()
        optimizer.step()
        scheduler.step()
        checkpointer.step()
    found = state_of(model, optimizer)
    bagua.communication.destroy_process_group()
    return start.step if start else 0, found


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("gradient_allreduce", {}),
        ("power_sgd", {"rank": 1}),
        ("local_sgd", {"interval": 2}),
        ("diloco", {"interval": 2}),
        ("decentralized", {"peer_selection_mode": "all"}),
        ("low_precision_decentralized", {}),
        ("q_adam", {}),
        ("top_k", {"density": 0.1}),
    ],
)
def test_continues_with_the_same_bits(
    make_ranks: Any, tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    def run(name: str, folder: str, steps: int) -> list[Any]:
        here = tmp_path / name
        here.mkdir()
        with make_ranks(here) as ranks:
            found: list[Any] = ranks.run(
                rank_trains, 2, folder=str(tmp_path / folder), steps=steps, algorithm=algorithm, options=options
            )
            return found

    whole = run("a", "whole", 8)
    run("b", "cut", 7)
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["step_0000000003", "step_0000000006"]
    again = run("c", "cut", 8)
    assert [start for start, _ in again] == [6, 6]
    for (_, wanted), (_, found) in zip(whole, again, strict=True):
        assert torch.equal(wanted, found)
