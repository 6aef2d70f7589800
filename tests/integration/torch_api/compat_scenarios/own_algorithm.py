"""How scenarios begin: a model under an algorithm that is written as users of the original wrote theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from compat_scenarios.support import (
    seeded,
)

RATE = 0.1


class Reified(Algorithm):
    """``implementation(process_group, *arguments)`` for each model."""

    def __init__(self, implementation: Any, *arguments: Any) -> None:
        self.implementation = implementation
        self.arguments = arguments

    def reify(self, process_group: Any) -> Any:
        return self.implementation(process_group, *self.arguments)


def start(algorithm: Algorithm, optimizer: Any = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(seed=bagua.get_rank())  # different on every rank: rank 0's counts
    made = (optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=RATE)))(model.parameters())
    return model.with_bagua([made], algorithm, **options), made
