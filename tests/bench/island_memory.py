#!/usr/bin/env python3
"""Measures the memory of a rank that holds a shard, beside the formula of docs/concepts/islands.md.

    bagua run --island-size 2 --nproc-per-node 4 tests/bench/island_memory.py
    bagua run --island-size 4 --nproc-per-node 8 tests/bench/island_memory.py --algorithm diloco:interval=2

Layers are made without memory (the device "meta") and sharded before they get any, so that no rank ever holds the whole
model. Figures are in MB: of pages that this process has touched, those that it shares with its daemon among them, less
those of a process that has imported all and joined the job.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua.torch_api as bagua

MB = 1e6


def pages(name):
    """Bytes of this process by that name of /proc: VmRSS, VmHWM (the largest VmRSS so far), RssShmem."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=512, help="of float32 parameters")
    parser.add_argument("--layers", type=int, default=16, help="each is a unit of FSDP")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--algorithm", default="gradient_allreduce", help="'none': FSDP2 alone, for comparison")
    options = parser.parse_args()
    if options.algorithm != "none":
        os.environ["BAGUA_ALGORITHM"] = options.algorithm
    bagua.init_process_group()
    size = bagua.get_island_size()
    width = int((options.megabytes * MB / 4 / options.layers) ** 0.5)
    mesh = init_device_mesh("cpu", (size,))
    bagua.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    start, found = pages("VmRSS"), {}

    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(options.layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=width**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found["parameters"] = pages("VmHWM")
    if options.algorithm != "none":
        model = model.with_bagua([optimizer])
    found["with_bagua"] = pages("VmHWM")
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.randn(2, width)).square().mean().backward()
        found["backward"] = pages("VmHWM")
        optimizer.step()
    found["all"] = pages("VmHWM")

    whole = 4 * width * width * options.layers
    kept = sum(one.nelement() * 4 // size for state in optimizer.state.values() for one in state.values() if one.dim())
    words = {
        "shard": whole / size,
        "unit": whole / options.layers,
        "optimizer": kept,
        "shared with the daemon": pages("RssShmem"),
        **{f"peak after {name}": value - start for name, value in found.items()},
    }
    print(json.dumps({"island": size, **{name: round(value / MB, 1) for name, value in words.items()}}), flush=True)


if __name__ == "__main__":
    main()
