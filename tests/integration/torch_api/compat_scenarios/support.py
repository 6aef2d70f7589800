"""Helpers of all scenarios: a small model, batches, and a reference of all ranks' models in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import bagua.torch_api as bagua

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


class Net(nn.Module):
    """A parameter of the root, and layers with several sizes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x * self.scale)))


def seeded(make: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 5, 10)).square().mean()


def replicas(make: Callable[[], nn.Module] = Net) -> list[nn.Module]:
    """All ranks' models at the start, in one process."""
    first = seeded(make)
    return [copy.deepcopy(first) for _ in range(bagua.get_world_size())]


def gradients(models: list[nn.Module], step: int) -> list[list[torch.Tensor]]:
    """Every rank's gradients of this step, by rank and parameter."""
    found = []
    for rank, model in enumerate(models):
        model.zero_grad()
        loss(model, rank, step).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def mean(rows: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(column).mean(0) for column in zip(*rows, strict=True)]


def check_equal(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            mine.detach(), other.detach(), rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
