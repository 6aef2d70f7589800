#!/usr/bin/env python3
"""Training steps inside of ``bagua.join`` beside steps outside of it: what it costs that ranks tell each other, before
each forward and each backward pass, that they have batches.

    bagua run --nproc-per-node 2 tests/bench/join_cost.py

Both take turns of 20 steps in the same processes. Printed for each width of three layers: medians in milliseconds.
"""

import argparse
import contextlib
import statistics
import time

import torch
from torch import nn

import bagua.torch_api as bagua

TURN = 20


def measure(width, turns):
    """(ms outside, ms inside) of a step."""
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model = model.with_bagua([optimizer])
    inputs = torch.randn(16, width)
    found = {False: [], True: []}
    for turn in range(2 * turns + 2):
        inside = turn % 2 == 1
        bagua.barrier()
        with bagua.join(model) if inside else contextlib.nullcontext():
            begun = time.perf_counter()
            for _ in range(TURN):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            if turn >= 2:
                found[inside].append((time.perf_counter() - begun) / TURN * 1000)
    model.bagua_ddp.close()
    return statistics.median(found[False]), statistics.median(found[True])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="16,256,1024")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bagua.init_process_group()
    for width in map(int, options.widths.split(",")):
        outside, inside = measure(width, options.turns)
        if bagua.get_rank() == 0:
            print(f"| {width} | {outside:.3f} | {inside:.3f} | {inside / outside:.2f} |", flush=True)


if __name__ == "__main__":
    main()
