#!/usr/bin/env python3
"""Steps of fused optimizers beside the plain loop and torch's foreach=True: how many times as fast.

    python tests/bench/fused_steps.py                # 1,000 tensors of 1,000 elements
    python tests/bench/fused_steps.py --tensors 200 --elements 5000

Gradients lie in two flat buffers in turn, as in Bagua's buckets, or come anew in each step, as after
``zero_grad(set_to_none=True)`` on one process. Optimizers take turns within each step, so that all see the same
machine; a ratio is the median over steps of a turn's own ratio. One thread.
"""

import argparse
import statistics
import time

import torch

from bagua.bench.report import markdown
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.contrib import fuse_optimizer

WARM_UP = 4
PLACES = ("buckets", "fresh")


class Own(torch.optim.Optimizer):
    """An optimizer as users write them: signs of a momentum (Lion, Chen et al. 2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = state["momentum"].mul(first).add_(parameter.grad, alpha=1 - first)
                parameter.add_(update.sign_(), alpha=-group["lr"])
                state["momentum"].mul_(second).add_(parameter.grad, alpha=1 - second)


class LoopedQAdam(QAdamOptimizer):
    """QAdam's formula, one parameter after the other: the plain loop."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step_id"] += 1
            for parameter in group["params"]:
                self._observe(group, [parameter])
                self._move(group, [parameter])


def kinds():
    """The loop, what torch or we have beside it, and the fused one, by optimizer."""
    optim = torch.optim
    return {
        "Adam": {
            "loop": lambda some: optim.Adam(some, foreach=False),
            "foreach": lambda some: optim.Adam(some, foreach=True),
            "fused": lambda some: fuse_optimizer(optim.Adam(some)),
        },
        "SGD with momentum": {
            "loop": lambda some: optim.SGD(some, lr=0.1, momentum=0.9, foreach=False),
            "foreach": lambda some: optim.SGD(some, lr=0.1, momentum=0.9, foreach=True),
            "fused": lambda some: fuse_optimizer(optim.SGD(some, lr=0.1, momentum=0.9)),
        },
        "QAdam": {
            "loop": lambda some: LoopedQAdam(some, warmup_steps=10_000),
            "foreach": lambda some: QAdamOptimizer(some, warmup_steps=10_000),
            "fused": lambda some: fuse_optimizer(QAdamOptimizer(some, warmup_steps=10_000)),
        },
        "one's own (Lion)": {"loop": Own, "fused": lambda some: fuse_optimizer(Own(some))},
    }


class Trained:
    """One optimizer with parameters, and gradients where they are to lie."""

    def __init__(self, make, tensors, elements, place):
        generator = torch.Generator().manual_seed(0)
        self._parameters = [torch.nn.Parameter(torch.randn(elements, generator=generator)) for _ in range(tensors)]
        self._sides = [torch.zeros(tensors, elements) for _ in range(2 if place == "buckets" else 0)]
        self._step = 0
        self.optimizer = make(self._parameters)
        self._make_step = getattr(self.optimizer, "fuse_step", self.optimizer.step)

    def step(self):
        self._step += 1
        flat = self._sides[self._step % 2].normal_() if self._sides else None
        for number, parameter in enumerate(self._parameters):
            parameter.grad = torch.randn_like(parameter) if flat is None else flat[number]
        begin = time.perf_counter()
        self._make_step()
        return time.perf_counter() - begin


def measure(tensors, elements, steps):
    """One row for each optimizer and place of gradients: how many times as fast as the others the fused one is."""
    rows = []
    for place in PLACES:
        for name, makers in kinds().items():
            trained = {label: Trained(make, tensors, elements, place) for label, make in makers.items()}
            seconds = [{label: one.step() for label, one in trained.items()} for _ in range(WARM_UP + steps)][WARM_UP:]
            row = {"optimizer": name, "gradients": place}
            for label in ("loop", "foreach"):
                ratios = [turn[label] / turn["fused"] for turn in seconds] if label in trained else []
                row[f"times as fast as {label}"] = round(statistics.median(ratios), 2) if ratios else None
            row["fused"] = trained["fused"].optimizer._bagua_fused_optimizer.count
            rows.append(row)
    return rows


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tensors", type=int, default=1000)
    options.add_argument("--elements", type=int, default=1000)
    options.add_argument("--steps", type=int, default=30)
    given = options.parse_args()
    torch.set_num_threads(1)
    print(markdown(measure(given.tensors, given.elements, given.steps)))


if __name__ == "__main__":
    main()
