"""One rank of the section ``net``: NCCL's all-reduce over the environment's network. Prints a JSON line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from gpu.common import be_a_host_of_ones_own, device_of, median, repeats_for, seconds_per_turn

MARK = "RESULT "
ROUNDS = 5
TURN_S = 0.03


def measure(sizes: list[int], device: torch.device, until: float) -> dict[int, float]:
    """Seconds of an all-reduce of so many bytes. Sizes for which there is no time are left out, on all ranks alike."""
    found = {}
    for size in sizes:
        data = torch.zeros(size // 4, device=device)
        work = lambda data=data: dist.all_reduce(data)  # noqa: E731
        for _ in range(2):
            work()
        # Rank 0's clock counts: all must do the same.
        said = torch.tensor(
            [repeats_for(seconds_per_turn(work, 2, device), TURN_S), time.monotonic() < until], device=device
        )
        dist.broadcast(said, 0)
        repeats, go_on = said.tolist()
        if not go_on:
            break
        found[size] = median([seconds_per_turn(work, repeats, device) for _ in range(ROUNDS)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    be_a_host_of_ones_own(options.rank)
    device = device_of(options.device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=options.seconds),
    )
    vector = torch.arange(1000, device=device, dtype=torch.float32) * (options.rank + 1)
    dist.all_reduce(vector)
    ranks = options.ranks * (options.ranks + 1) / 2
    right = bool((vector.cpu() == torch.arange(1000) * ranks).all())
    found = measure(options.sizes, device, until)
    print(MARK + json.dumps({"right": right, "seconds": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
