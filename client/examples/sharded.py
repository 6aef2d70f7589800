"""The small transformer of ``charlm``, each copy of it sharded over an island of ranks by FSDP2.

    bagua run --island-size 2 --nproc-per-node 4 -m bagua.examples.sharded
    bagua run --island-size 2 --nproc-per-node 4 -m bagua.examples.sharded --algorithm diloco:interval=8
    bagua run --elastic --island-size 2 --nproc-per-node 4 --respawn 4 -m bagua.examples.sharded

In an elastic job kill a rank while it runs (each prints its pid): ``kill -9 PID``. Its island is out, the others go on,
and with ``--respawn`` another island takes its place. No sample is lost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import torch
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.examples import _common, charlm


def shard(model: charlm.CharTransformer) -> None:
    """Divides the model among the ranks of this island, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (bagua.get_island_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank that is left and returns the outcome of the job."""
    print(f"rank {bagua.get_rank()} of island {bagua.get_island()}: pid {os.getpid()}", flush=True)
    text = charlm.read_library(options.characters)
    held_out_from = int(len(text) * (1 - charlm.HELD_OUT_SHARE))
    windows = text[:held_out_from].unfold(0, charlm.CONTEXT + 1, charlm.CONTEXT)
    sampler = bagua.contrib.ElasticSampler(TensorDataset(windows), global_batch=options.global_batch, seed=options.seed)
    loader = sampler.loader()

    torch.manual_seed(options.seed)
    model = charlm.CharTransformer()
    if bagua.get_island_size() > 1:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    total = options.epochs * loader.steps_of_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: charlm.learning_rate(step, total))
    model = model.with_bagua([optimizer])  # gradient all-reduce, or what --algorithm says
    bagua.register_state("schedule", schedule)
    before, started = charlm.held_out_loss(model, text[held_out_from:]), time.monotonic()
    for epoch in sampler.epochs(options.epochs):
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = charlm.loss_of(model, batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            schedule.step()
            if bagua.get_rank() == 0:
                bagua.report(step=schedule.last_epoch, total=total, metrics={"loss": loss.item()})
        if bagua.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} islands {bagua.get_replica_count()}", flush=True)
    seconds = time.monotonic() - started
    _common.finish(model)
    results = {
        "held-out loss before": before,
        "held-out loss after": charlm.held_out_loss(model, text[held_out_from:]),
    }
    return _common.outcome(model, schedule.last_epoch, seconds, results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = _common.parser(__doc__, epochs=2, lr=6e-3)
    parser.add_argument(
        "--global-batch", type=int, default=48, help=f"windows of {charlm.CONTEXT} characters in a step"
    )
    parser.add_argument("--characters", type=int, default=400_000, help="of the standard library's sources")
    _common.add_algorithm(parser)
    options = parser.parse_args(arguments)
    _common.take_algorithm(options)
    return _common.run(options, train)


if __name__ == "__main__":
    sys.exit(main())
