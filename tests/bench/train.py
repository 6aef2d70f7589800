#!/usr/bin/env python3
"""One training step of the examples' models, two ranks on one host: bagua, DDP with Gloo, and no communication.

    python tests/bench/train.py --models digits charlm

The three replicas of a model live in the same processes and take turns of a few steps each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import harness

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = {"digits": 32, "charlm": 24}


def model_and_loss(name: str) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]:
    """A factory of the example's model, and its loss on one fixed batch."""
    import torch
    import torch.nn.functional as F

    from bagua.examples import charlm, digits

    if name == "digits":
        images, labels = torch.rand(BATCH[name], 1, 8, 8), torch.randint(10, (BATCH[name],))
        return digits.DigitsNet, lambda model: F.cross_entropy(model(images), labels)
    text = torch.randint(len(charlm.ALPHABET), (10_000,))
    inputs, targets = charlm.draw(text, BATCH[name], torch.Generator().manual_seed(0))
    return charlm.CharTransformer, lambda model: charlm.loss_of(model, inputs, targets)


def steps_of(model: nn.Module, prepare: str, loss_of: Callable[[nn.Module], Tensor], steps: int) -> Callable[[], float]:
    """A function that trains ``steps`` steps and returns milliseconds per step of the slowest rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trained: nn.Module = model
    if prepare == "bagua":
        trained = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    elif prepare == "ddp":
        trained = DistributedDataParallel(model)

    def train() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(trained).backward()
            optimizer.step()

    def measured() -> float:
        dist.barrier()
        return harness.slowest(harness.timed(train) / steps)

    return measured


def worker(result: Path, names: list[str], steps: int, rounds: int) -> None:
    import torch.distributed as dist

    import bagua.torch_api as bagua

    bagua.init_process_group()
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        make, loss_of = model_and_loss(name)
        variants = {prepare: steps_of(make(), prepare, loss_of, steps) for prepare in ("bagua", "ddp", "none")}
        found[name] = harness.medians(harness.interleave(variants, rounds))
    if bagua.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(BATCH), default=["digits", "charlm"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="per turn")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.smoke:
        options.models, options.steps, options.rounds = ["digits"], 2, 1
    if options.worker:
        worker(options.worker, options.models, options.steps, options.rounds)
        return
    arguments = ["--steps", str(options.steps), "--rounds", str(options.rounds), "--models", *options.models]
    rows = [
        {"model": name, "ranks": options.ranks, **found, "ddp/bagua": round(found["ddp"] / found["bagua"], 2)}
        for name, found in harness.launch(__file__, options.ranks, arguments).items()
    ]
    harness.finish(options, rows, "ms per step, median of the slowest rank; none: without communication")


if __name__ == "__main__":
    main()
