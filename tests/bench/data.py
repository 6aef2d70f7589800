#!/usr/bin/env python3
"""Figures of docs/data.md.

    python tests/bench/data.py idle        # 4 ranks, a transformer, lognormal lengths: how long ranks wait
    python tests/bench/data.py cache       # epochs of a slow loader through a cache
    python tests/bench/data.py samplers    # an epoch of ten million samples: seconds and memory

idle: in each step a rank computes its gradients and then waits in a barrier. "waited" is the share of time in the
barrier. With fewer cores than ranks that time is not all lost: others compute faster meanwhile. "imbalance" is
therefore counted in processor time: the share of a step in which a rank would wait if each had a core. Samplers take
turns.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import bagua.torch_api as bagua
from bagua.bench.ranks import harness
from bagua.cli.bench import tasks
from bagua.torch_api.contrib import CachedDataset, LoadBalancingDistributedSampler, TokenBudgetBatchSampler

BATCH = 8
LONGEST = 400
PLAIN = "DistributedSampler"


def measure(config):
    """(share of time in the barrier, imbalance) of each epoch, by sampler."""
    samples, turns = config["samples"], config["turns"]
    ranks, rank = bagua.get_world_size(), bagua.get_rank()
    random = torch.Generator().manual_seed(0)
    lengths = torch.randn(samples, generator=random).mul(0.8).add(3.9).exp().ceil().clamp_max(LONGEST).long()
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = model.with_bagua([torch.optim.SGD(model.parameters(), 1e-3)])
    indices = list(range(samples))
    plain = DistributedSampler(indices, ranks, rank)
    balanced = LoadBalancingDistributedSampler(indices, lengths)
    learning = LoadBalancingDistributedSampler(indices, "measured", size_fn=lengths)
    blind = LoadBalancingDistributedSampler(indices, "measured")
    budget = TokenBudgetBatchSampler(indices, lengths, budget=BATCH * 100)

    def loader(sampler):
        if sampler is budget:
            return DataLoader(indices, batch_sampler=sampler)
        return DataLoader(indices, BATCH, sampler=sampler, drop_last=True)

    def epoch(sampler, number):
        """(waits of each step, processor time of each step, seconds) of this rank."""
        sampler.set_epoch(number)
        batches = loader(sampler)
        if sampler in (learning, blind):
            batches = sampler.timed(batches, time.process_time)
        waits, works = [], []
        bagua.barrier()
        began = time.perf_counter()
        for batch in batches:
            length = int(lengths[batch].max())
            worked = time.process_time()
            with model.bagua_ddp.no_sync():
                model(torch.zeros(len(batch), length, 64)).square().mean().backward()
            works.append(time.process_time() - worked)
            waiting = time.perf_counter()
            bagua.barrier()
            waits.append(time.perf_counter() - waiting)
        return waits, works, time.perf_counter() - began

    names = {
        PLAIN: plain,
        "LoadBalancingDistributedSampler": balanced,
        "the same, measured by size": learning,
        "the same, measured by sample": blind,
        "TokenBudgetBatchSampler": budget,
    }
    found = {name: [] for name in names}
    for turn in range(turns + 1):
        for name, sampler in names.items():
            harness.progress(turn, turns + 1, name)
            waits, works, seconds = epoch(sampler, turn)
            mine = torch.tensor([waits, works], dtype=torch.float64)
            everybody = torch.empty(ranks * mine.numel(), dtype=torch.float64)
            bagua.allgather(mine.flatten(), everybody)
            wait, work = everybody.view(ranks, 2, -1).unbind(1)
            imbalance = (work.max(0).values - work.mean(0)).sum() / work.max(0).values.sum()
            if turn:  # the first one warms up, and is measured by those that learn
                found[name].append((float(wait.mean(0).sum()) / seconds, float(imbalance)))
    return found


def idle(options):
    config = {"samples": options.samples, "turns": options.turns}
    found = tasks.measure(tasks.Task(__file__, config, 1, 4, quiet=True), None)
    rows = []
    for name, pairs in found.items():
        waited, imbalance = (sorted(values)[len(values) // 2] for values in zip(*pairs, strict=True))
        rows.append({"sampler": name, "waited": f"{waited:.1%}", "imbalance": f"{imbalance:.1%}"})
    return rows


class Slow:
    """A dataset that takes ``seconds`` for a sample of 48 KiB."""

    def __init__(self, length, seconds):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((3, 64, 64), float(index))


def cache(options):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for workers in (0, 2):
            cached = CachedDataset(
                Slow(options.samples, 0.01), folder=Path(folder, str(workers)), secret=os.urandom(32)
            )
            before = 0
            for epoch in range(3):
                began = time.perf_counter()
                for _ in DataLoader(cached, 16, shuffle=True, num_workers=workers):
                    pass
                seconds = time.perf_counter() - began
                counts = cached.cache_loader.statistics()
                hits, before = counts.hits - before, counts.hits
                row = {"workers": workers, "epoch": epoch + 1, "seconds": round(seconds, 3)}
                rows.append(row | {"hit rate": f"{hits / options.samples:.1%}"})
    return rows


KINDS = {
    "balanced, costs as a tensor": lambda n, costs: LoadBalancingDistributedSampler(range(n), costs, 4, 0),
    "balanced, costs by a function": lambda n, _: LoadBalancingDistributedSampler(range(n), float, 4, 0),
    "by budget": lambda n, costs: TokenBudgetBatchSampler(range(n), costs, 16384, num_replicas=4, rank=0),
}


def epoch_of(kind, count):
    """A row of ``samplers``."""
    costs = torch.randn(count).exp().mul(50).ceil().clamp_max(1000)
    wall, cpu = time.perf_counter(), time.process_time()
    items = sum(1 for _ in KINDS[kind](count, costs))
    seconds, work = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    figures = {"seconds": round(seconds, 2), "processor seconds": round(work, 2), "peak MiB": peak}
    return {"sampler": kind, **figures, "items": items}


def samplers(options):
    """Each in a process of its own: the peak of memory is that of a process."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(epoch_of, (kind, options.samples)) for kind in KINDS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("idle", "cache", "samplers"))
    parser.add_argument("--samples", type=int, default=0, help="of the dataset; by default 1600, 500 or ten million")
    parser.add_argument("--turns", type=int, default=5, help="epochs of idle")
    options = parser.parse_args()
    options.samples = options.samples or {"idle": 1600, "cache": 500, "samplers": 10_000_000}[options.what]
    rows = {"idle": idle, "cache": cache, "samplers": samplers}[options.what](options)
    for row in rows:
        print("   ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
