"""An algorithm that gives every bucket the plan that it was made with, and what scenarios of plans share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, AlgorithmImpl, AllReduce, Broadcast, Plan
from bagua.algorithms.plan import GRADIENT, HOST, LEADERS, RESULT, WEIGHT, Step
from training_scenarios.support import (
    mlp,
    seeded,
    sgd,
    square,
)


class PlanImpl(AlgorithmImpl):
    """Gives every bucket the same plan. Plans of weights run after each step of the last optimizer."""

    def __init__(self, group: Any, made: PlanAlgorithm) -> None:
        super().__init__(group)
        self.exchanged = made.exchanged
        self.made = made
        self.reset = self.closed = False

    def need_reset(self) -> bool:
        reset, self.reset = self.reset, False
        return reset

    def init_operations(self, ddp: Any, bucket: Any) -> None:
        for name in self.made.slots:
            bucket.add_slot(name)
        bucket.set_plan(Plan(tuple(self.made.steps)))

    def init_post_optimizer_step_hook(self, ddp: Any) -> Callable[[torch.optim.Optimizer], None]:
        def after_step(optimizer: torch.optim.Optimizer) -> None:
            if self.exchanged == WEIGHT and optimizer is ddp.bagua_optimizers[-1]:
                for bucket in ddp.bagua_buckets:
                    bucket.start()
                ddp.join()

        return after_step

    def close(self) -> None:
        self.closed = True


class PlanAlgorithm(Algorithm):
    def __init__(self, *steps: Step, exchanged: str = GRADIENT, slots: Sequence[str] = ()) -> None:
        self.steps, self.exchanged, self.slots = steps, exchanged, slots

    def reify(self, group: Any) -> PlanImpl:
        return PlanImpl(group, self)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        square(model, bagua.get_rank(), step).backward()
        optimizer.step()


def reference_of_means(steps: range, make: Callable[[], nn.Module] = mlp) -> list[nn.Module]:
    """All ranks' models in one process, each with its own optimizer; weights become the mean after each step."""
    models = [seeded(make) for _ in range(bagua.get_world_size())]
    optimizers = [sgd(model) for model in models]
    for step in steps:
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            optimizer.step()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack(list(same)).mean(0)
                for parameter in same:
                    parameter.copy_(mean)
    return models


BY_LEVELS = (
    AllReduce("SUM", GRADIENT, RESULT, over=HOST),
    AllReduce("SUM", RESULT, RESULT, over=LEADERS),
    Broadcast(RESULT, over=HOST),
)
MEAN = AllReduce("AVG", WEIGHT, WEIGHT)
