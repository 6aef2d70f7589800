"""An algorithm of one's own, beside gradient all-reduce, where one rank's sensor is broken now and then.

    bagua run --nproc-per-node 4 -m bagua.examples.own_algorithm

The mean of all ranks' gradients follows whoever shouts loudest. ``NormalisedMean`` gives every rank the same say: each
gradient is scaled to length one before it is averaged. "An algorithm of your own" in algorithms/README.md goes
through it. Ends with exit code 1 if the algorithm does not learn.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import (
    Algorithm,
    AlgorithmImpl,
    AllReduce,
    Bucket,
    DataParallel,
    GradientAllReduceAlgorithm,
    Local,
    Plan,
    ProcessGroup,
)
from bagua.algorithms.plan import GRADIENT, RESULT


class NormalisedMean(Algorithm):
    """g = mean over ranks of g_i / |g_i|, for each parameter."""

    def reify(self, process_group: ProcessGroup) -> AlgorithmImpl:
        return NormalisedMeanImpl(process_group)


class NormalisedMeanImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        normalise = Local(self.normalise, reads=(GRADIENT,), writes=(RESULT,))
        bucket.set_plan(Plan((normalise, AllReduce("AVG", RESULT, RESULT))))

    def normalise(self, bucket: Bucket) -> None:
        for gradient, scaled in zip(bucket.views(GRADIENT), bucket.views(RESULT), strict=True):
            torch.div(gradient, gradient.norm().clamp(min=1e-12), out=scaled)  # zeros stay zeros


FEATURES, STEPS, BATCH = 8, 300, 32
RATE = 0.1
LOUD = 1000.0  # Factor of a broken sensor
NEEDED_LOSS = 0.05


def targets(inputs: torch.Tensor) -> torch.Tensor:
    """The function that the model learns: float32 [n, FEATURES] -> [n, 1]."""
    return inputs.sum(dim=1, keepdim=True) - 0.5


def train(algorithm: Algorithm) -> float:
    """The loss of a linear model on clean data after training, on every rank."""
    rank, last = bagua.get_rank(), bagua.get_world_size() - 1
    random = torch.Generator().manual_seed(rank)  # each rank has data of its own
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, STEPS)
    model = model.with_bagua([optimizer], algorithm)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, FEATURES, generator=random)
        wanted = targets(inputs)
        if rank == last and step % 10 == 0:
            wanted *= LOUD
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        schedule.step()
    clean = torch.randn(1000, FEATURES, generator=torch.Generator().manual_seed(1 << 20))
    with torch.no_grad():
        return nn.functional.mse_loss(model(clean), targets(clean)).item()


def main() -> int:
    """Runs one rank; returns the exit code of the process."""
    bagua.init_process_group()
    usual, own = train(GradientAllReduceAlgorithm()), train(NormalisedMean())
    if bagua.get_rank() == 0:
        print(f"gradient all-reduce  held-out loss {usual:.4f}\nNormalisedMean       held-out loss {own:.4f}")
    return 0 if own < NEEDED_LOSS else 1


if __name__ == "__main__":
    sys.exit(main())
