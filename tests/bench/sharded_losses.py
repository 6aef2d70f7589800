#!/usr/bin/env python3
"""Losses of sharded models after training, on two hosts: FSDP2 with ``bagua.fsdp.compress`` beside FSDP2 over Gloo, and
``streaming_diloco`` in four bits on islands beside replicas. The small transformer of ``bagua bench accuracy``.

    python tests/bench/sharded_losses.py                        # 3 seeds of 800 steps
    python tests/bench/sharded_losses.py --seeds 1 --steps 40   # a quick look
    python tests/bench/sharded_losses.py --only islands

Both of a pair begin with the same weights, and get the same samples: ranks of an island share those of a replica.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import bagua.torch_api as bagua
from bagua.bench.accuracy import SETTINGS, TASKS
from bagua.bench.ranks import accuracy, harness
from bagua.cli.bench import tasks
from bagua.examples import _common, charlm
from bagua.fsdp import compress

TASK = TASKS["charlm"]
FEW, GLOO, ISLANDS, REPLICAS = "fsdp.compress int4", "FSDP2 over Gloo", "islands of 2", "replicas"
DILOCO = next(one for one in SETTINGS if one.name == "streaming_diloco")  # int4 is its default


def shard(model, mesh):
    """Shards it by block."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, data, seed, steps, algorithm=None):
    """Trains it, and returns its loss on held-out text; of the mean of all copies, if they differ."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=TASK.lr, betas=(0.9, TASK.beta2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(charlm.learning_rate, total=steps))
    if algorithm is not None:
        model = model.with_bagua([optimizer], algorithm)
    size, place = bagua.get_island_size(), bagua.get_rank() % bagua.get_island_size()
    generator = torch.Generator().manual_seed(seed * 10_007 + bagua.get_island())
    for _ in range(steps):
        inputs, targets = charlm.draw(data.training, TASK.batch_size, generator)
        optimizer.zero_grad()
        charlm.loss_of(model, inputs[place::size], targets[place::size]).backward()
        optimizer.step()
        schedule.step()
    if algorithm is not None:
        _common.finish(model)
    return data.value(model)


def losses(config):
    """Losses by system and seed."""
    data, found = accuracy.CharacterModel(validation=False), {}
    for seed in range(config["seeds"]):
        make = partial(new_model, data, seed)
        if config["kind"] == FEW:
            for name, backend in ((FEW, "bagua"), (GLOO, "gloo")):
                model = shard(make(), DeviceMesh.from_group(dist.new_group(backend=backend), "cpu"))
                if name == FEW:
                    compress(model)
                found.setdefault(name, []).append(train(model, data, seed, config["steps"]))
        else:
            model, size = make(), bagua.get_island_size()
            if size > 1:
                shard(model, init_device_mesh("cpu", (size,)))
            algorithm = accuracy.make_algorithm({"algorithm": DILOCO.algorithm}, config["steps"])
            found.setdefault(config["kind"], []).append(train(model, data, seed, config["steps"], algorithm))
    return found


def new_model(data, seed):
    torch.manual_seed(seed)
    return data.model()


def measure(config):
    if config["kind"] == FEW:
        dist.init_process_group("bagua")
    return losses(config)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=TASK.steps)
    pairs = {"few-bits": {FEW: 1}, "islands": {ISLANDS: 2, REPLICAS: 1}}  # kinds of jobs, and ranks of an island
    parser.add_argument("--only", choices=pairs)
    options = parser.parse_args()
    for pair in [options.only] if options.only else pairs:
        found = {}
        for kind, size in pairs[pair].items():
            config = {"kind": kind, "seeds": options.seeds, "steps": options.steps, "island_size": size}
            found |= tasks.measure(tasks.Task(__file__, config, 2, size), None)
        ours, other = found
        for name, values in found.items():
            print(f"{name:<20}" + "".join(f"{value:9.4f}" for value in values) + f"   mean {fmean(values):.4f}")
        difference = 100 * (fmean(found[ours]) / fmean(found[other]) - 1)
        spread = 100 * (max(found[other]) - min(found[other])) / fmean(found[other])
        print(f"{difference:+.2f} % of {other}, whose seeds spread over {spread:.2f} %", flush=True)


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
