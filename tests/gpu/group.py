"""A group of plain torch.distributed in ranks of the engine: the peer, and what the ranks tell each other by."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from gpu.common import median, repeats_for, seconds_per_turn

ROUNDS = 7
TURN_S = 0.04


def join(port: int, device: torch.device, limit_s: float) -> None:
    """Bagua's group of all ranks, and NCCL's (Gloo's on the CPU) beside it."""
    os.environ["BAGUA_TORCH_DISTRIBUTED"] = "0"  # the peer's group is torch's, not Bagua's in its place
    bagua.init_process_group()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=bagua.get_rank(),
        world_size=bagua.get_world_size(),
        timeout=timedelta(seconds=limit_s),
    )


def agreed(value: float, device: torch.device) -> float:
    """Rank 0's value."""
    said = torch.tensor([value], dtype=torch.float32, device=device)
    dist.broadcast(said, 0)
    return float(said.item())


def in_turns(works: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median seconds of each, measured in turns, as many times on all ranks."""
    repeats = {}
    for name, work in works.items():
        for _ in range(3):
            work()
        repeats[name] = int(agreed(repeats_for(seconds_per_turn(work, 3, device), TURN_S), device))
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            dist.barrier()
            taken[name].append(seconds_per_turn(work, repeats[name], device))
    return {name: median(values) for name, values in taken.items()}


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor([seconds], dtype=torch.float32, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())
