"""Handwritten digits, learned by ranks that come and go: the others go on, and no sample is lost.

    bagua run --elastic --nproc-per-node 4 -m bagua.examples.elastic

Kill a rank while it runs (each prints its pid): ``kill -9 PID``. With ``--respawn 10`` another one takes its place. The
global batch stays the same, so that the learning rate does, too. With --batch-size it is the batch of each rank that
stays, and the learning rate follows the ranks.
Ends with exit code 1 if the held-out accuracy is below 97 % or the replicas differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import bagua.torch_api as bagua
from bagua.examples import _common
from bagua.examples.digits import NEEDED_ACCURACY, RESULT, DigitsNet, accuracy, load_digits, shift


class Progress:
    """Steps so far. Ranks that join take the number over."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank that is left and returns the outcome of the job."""
    print(f"rank {bagua.get_rank()}: pid {os.getpid()}", flush=True)
    training, held_out = load_digits()
    sizes = {"batch_size": options.batch_size} if options.batch_size else {"global_batch": options.global_batch}
    sampler = bagua.contrib.ElasticSampler(training, **sizes, seed=options.seed)
    loader = sampler.loader(num_workers=options.workers)

    torch.manual_seed(options.seed)
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model = model.with_bagua([optimizer])
    if options.batch_size:
        bagua.contrib.scale_lr("sqrt", optimizer)

    @bagua.on_membership_change
    def tell(change: Any) -> None:
        if change.rank == 0:
            print(
                f"generation {change.generation}: {change.previous_world_size} -> {change.world_size} ranks", flush=True
            )

    progress = Progress()
    bagua.register_state("progress", progress)
    started = time.monotonic()
    for epoch in sampler.epochs(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(shift(images)), labels)
            loss.backward()
            optimizer.step()
            progress.step += 1
            if bagua.get_rank() == 0:
                bagua.report(
                    step=progress.step, metrics={"loss": loss.item(), "epoch": epoch, "ranks": bagua.get_world_size()}
                )
    seconds = time.monotonic() - started
    _common.finish(model)
    return _common.outcome(model, progress.step, seconds, {RESULT: accuracy(model, held_out)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = _common.parser(__doc__, epochs=30, lr=3e-3)
    parser.add_argument("--global-batch", type=int, default=128, help="samples of all ranks together in a step")
    parser.add_argument("--batch-size", type=int, default=0, help="samples of each rank in a step, instead")
    parser.add_argument("--workers", type=int, default=0, help="processes that load samples, for each rank")
    options = parser.parse_args(arguments)

    _common.need("sklearn")
    return _common.run(options, train, RESULT, NEEDED_ACCURACY)


if __name__ == "__main__":
    sys.exit(main())
