#!/usr/bin/env python3
"""Steps of a three-layer network of 1000 parameters, with every algorithm, beside DDP over Gloo: what a step costs when
there is nothing to compute and little to send.

    python tests/bench/tiny_steps.py                 # 4 ranks of one host
    python tests/bench/tiny_steps.py --nnodes 2 --nproc-per-node 2

ms: median over turns of 50 steps, of the slowest rank; systems take turns, so that all see the same machine.
"""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua.bench.ranks import harness
from bagua.cli.bench import tasks
from bagua.examples._common import adam_for

TURN = 50
DDP = "ddp (gloo)"
# QAdam and its kin are measured beyond their warm-up.
ARGUMENTS = {"async": {"sync_interval_ms": 50}}


def trainer(name):
    """A turn: seconds of a step of the slowest rank."""
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 18), nn.Tanh(), nn.Linear(18, 8))
    optimizer = adam_for(name, model.parameters(), 1e-4, steps=4 * TURN)
    if name == DDP:
        model = DistributedDataParallel(model)
    else:
        model = model.with_bagua([optimizer], Algorithm.init(name, **ARGUMENTS.get(name, {})))
    inputs = torch.randn(8, 16)

    def train():
        for _ in range(TURN):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    def turn():
        bagua.barrier()
        return harness.slowest(harness.seconds(train) / TURN)

    return turn


def measure(config):
    """Median seconds of a step, by system."""
    harness.start_gloo()
    names = [DDP, *GlobalAlgorithmRegistry.available_algorithms()]
    names = [name for name in names if not config["only"] or name in config["only"]]
    turns = {name: trainer(name) for name in names}
    found = {name: [] for name in names}
    rounds = max(3, config["steps"] // TURN)
    for number in range(rounds + 2):
        harness.progress(number, rounds + 2, "turns")
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = turns[name]()
            if number >= 2:
                found[name].append(seconds)
    bagua.barrier()
    harness.stop_gloo()
    return harness.medians(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=4)
    parser.add_argument("--only", default="", help="names of algorithms with commas")
    options = parser.parse_args()
    config = {"steps": options.steps, "only": [name for name in options.only.split(",") if name]}
    found = tasks.measure(tasks.Task(__file__, config, options.nnodes, options.nproc_per_node, quiet=True), None)
    for name, seconds in sorted(found.items(), key=lambda one: one[1]):
        print(f"{name:<30} {1e3 * seconds:.2f} ms")


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
