"""A group of plain torch.distributed in ranks of the engine: the peer, and what the ranks tell each other by."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from gpu.common import median, repeats_for, seconds_per_turn

ROUNDS, FEW_ROUNDS = 7, 3
TURN_S = 0.04


def join(port, device, limit_s):
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


def agreed(value, device):
    said = torch.tensor([value], dtype=torch.float32, device=device)
    dist.broadcast(said, 0)
    return float(said.item())


def in_turns(works, device):
    """Median seconds of each, measured in turns, as many times on all ranks."""
    repeats = {}
    for name, work in works.items():
        work()
        once = agreed(seconds_per_turn(work, 1, device), device)
        if once < TURN_S:  # what takes longer is warm, and measured well enough
            once = agreed(seconds_per_turn(work, 4, device), device)
        repeats[name] = repeats_for(once, TURN_S)
    taken = {name: [] for name in works}
    for _ in range(rounds_for(repeats.values())):
        for name, work in works.items():
            dist.barrier()
            taken[name].append(seconds_per_turn(work, repeats[name], device))
    return {name: median(values) for name, values in taken.items()}


def rounds_for(repeats):
    """Fewer where one turn alone takes long."""
    return ROUNDS if min(repeats) > 1 else FEW_ROUNDS


def cost_of(seconds):
    """Seconds that ``in_turns`` needs for works of which each takes so long."""
    known = [(one, repeats_for(one, TURN_S)) for one in seconds]
    rounds = rounds_for(repeats for _, repeats in known) if known else 0
    return sum(one * (2 + 4 * (one < TURN_S) + rounds * repeats) for one, repeats in known)


def predicted(known, size):
    """Seconds that work of this size takes, by those of the sizes before: as much more as from the last but one to the
    last, and with one alone in proportion; a half more than that, since not all grows so evenly."""
    *before, last = sorted(known)
    start, base = (before[-1], known[before[-1]]) if before else (0, 0.0)
    slope = max(0.0, known[last] - base) / (last - start)
    return 1.5 * (known[last] + slope * max(0, size - last))


def slowest(seconds, device):
    value = torch.tensor([seconds], dtype=torch.float32, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())
