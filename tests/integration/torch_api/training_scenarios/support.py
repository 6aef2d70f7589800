"""Helpers of all scenarios: seeded models and batches, and the comparison with one process on all ranks' batches."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

Loss = Callable[[nn.Module, int, int], torch.Tensor]  # (model, rank, step) -> loss on that rank's batch

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4))


def square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 6, 10)).square().mean()


def wide_mlp() -> nn.Module:
    """In float64: what rounds in another order, or by other instructions, stays small over many steps."""
    return mlp().double()


def wide_square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 6, 10).double()).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def wrap(model: nn.Module, *optimizers: torch.optim.Optimizer, average: bool = True, **options: Any) -> nn.Module:
    return model.with_bagua(list(optimizers), GradientAllReduceAlgorithm(average=average), **options)


def check_identical(model: nn.Module) -> None:
    """All ranks hold the same bits."""
    for name, parameter in model.named_parameters():
        mine = parameter.detach().contiguous().view(-1).view(torch.uint8)
        everyone = torch.zeros(bagua.get_world_size(), mine.numel(), dtype=torch.uint8)
        bagua.allgather(mine, everyone)
        assert bool((everyone == everyone[0]).all()), f"{name} differs between ranks"


def check_close(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance / 10, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert (mine.grad is None) == (other.grad is None), f"gradient of {name}: {mine.grad} is not {other.grad}"
        if mine.grad is not None:
            gradients = mine.grad.to_dense(), other.grad.to_dense()
            torch.testing.assert_close(*gradients, rtol=max(tolerance, 1e-4), atol=tolerance / 10)


def compare(
    make: Callable[[], nn.Module],
    loss: Loss = square,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    *,
    steps: int = 5,
    set_to_none: bool = True,
    average: bool = True,
    tolerance: float = 1e-5,
    between: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> nn.Module:
    """Trains ``make()`` wrapped, from rank 0's state, and as one process; both must agree. Returns the wrapped
    model."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference = seeded(make)
    reference_optimizer = optimizer(reference)
    model = seeded(make, seed=rank)  # different on every rank: rank 0's counts
    model_optimizer = optimizer(model)
    wrap(model, model_optimizer, average=average, **options)
    for step in range(steps):
        reference_optimizer.zero_grad(set_to_none)
        total = sum(loss(reference, other, step) for other in range(n)) / (n if average else 1)
        total.backward()
        between(reference)
        reference_optimizer.step()
        model_optimizer.zero_grad(set_to_none)
        loss(model, rank, step).backward()
        between(model)
        model_optimizer.step()
    check_close(model, reference, tolerance)
    check_identical(model)
    return model


def check_close_parameters(model: nn.Module, reference: nn.Module) -> None:
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@contextlib.contextmanager
def warnings_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
