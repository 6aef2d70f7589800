"""The rule of an elastic sampler that knows what samples cost: the ranks' batches of a round cost about the same."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import torch

from bagua.torch_api.data.complexity import rising
from bagua.torch_api.data.shares import Batch


def digest(costs: torch.Tensor) -> str:
    """A checksum, by which ranks tell whether they have the same costs. ``costs``: float64, contiguous."""
    memory = (ctypes.c_char * (costs.numel() * costs.element_size())).from_address(costs.data_ptr())
    return hashlib.blake2b(memory, digest_size=8).hexdigest()


def balanced_order(costs: torch.Tensor, chunk: int, random: torch.Generator) -> list[int]:
    """Orders all samples in chunks of like costs, which come in random order. The dearest ones, if they fill no chunk,
    come last.
    """
    shuffled = torch.randperm(len(costs), generator=random)
    order = shuffled[rising(costs[shuffled])]
    whole = len(order) // chunk * chunk
    chunks = order[:whole].view(-1, chunk)
    return torch.cat([chunks[torch.randperm(len(chunks), generator=random)].flatten(), order[whole:]]).tolist()


def balanced_split(costs: Sequence[float], pool: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Divides the positions of a round among ranks: all get one of the dearest, then of the next ones, and so on; the
    dearest of them goes to the rank that has least so far. ``costs``: by position in the order of the epoch."""
    falling = sorted(pool, key=lambda position: (-costs[position], position))
    parts: list[list[int]] = [[] for _ in sizes]
    loads = [0.0] * len(sizes)
    begin = 0
    while begin < len(falling):
        open_ranks = [rank for rank, size in enumerate(sizes) if len(parts[rank]) < size]
        open_ranks.sort(key=lambda rank: loads[rank])
        for rank, position in zip(open_ranks, falling[begin:], strict=False):
            parts[rank].append(position)
            loads[rank] += costs[position]
        begin += len(open_ranks)
    return [tuple(part) for part in parts]
