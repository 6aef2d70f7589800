"""The speed of this machine at what exchanges need: codecs, memory, and the engine between two hosts without a wire.

Two nodes of one rank each, on loopback: both engines work at once, as on two machines, unless cores are short.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.algorithms.codec import NAMES
from bagua.bench.ranks import harness
from bagua.bench.ranks.codec import Subject

SMALL_BYTES = 4 << 10
LARGE_BYTES = 16 << 20
MEMORY_BYTES = 64 << 20  # More than caches hold: gradients come from memory
ROUNDS = 7


def median_s(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median seconds of an action, which runs once before."""
    action()
    return statistics.median(harness.seconds(action) for _ in range(rounds))


def all_reduce_s(nbytes: int, rounds: int) -> float:
    """Returns the seconds of the slowest rank, with memory as buckets have it."""
    vector = bagua.empty(nbytes // 4)
    return harness.slowest(median_s(lambda: bagua.allreduce_inplace(vector), rounds))


def codec_speeds() -> dict[str, dict[str, float]]:
    """Bytes of float32 per second of one thread."""
    count = MEMORY_BYTES // 4
    torch.manual_seed(0)
    x = torch.randn(count)
    found = {}
    for name in NAMES:
        if name != "none":
            subject = Subject(name, count, x)
            subject.encode()
            found[name] = {
                "encode": MEMORY_BYTES / median_s(subject.encode, 3),
                "decode": MEMORY_BYTES / median_s(subject.decode_add, 3),
            }
    return found


def measure(_: dict[str, Any]) -> dict[str, Any] | None:
    """The speeds of a step profile, as ``bagua.tuning.profile.Speeds`` has them, without ``reduce``. ``socket`` is what
    the engine reaches where no wire limits it."""
    operation_s = all_reduce_s(SMALL_BYTES, 51)
    large_s = all_reduce_s(LARGE_BYTES, ROUNDS)
    target, other = torch.zeros(MEMORY_BYTES // 4), torch.ones(MEMORY_BYTES // 4)
    memory = MEMORY_BYTES / median_s(lambda: target.add_(other))
    codecs = codec_speeds() if bagua.get_rank() == 0 else {}
    bagua.barrier()
    # The rest of its time is what sending, receiving and the engine's own work take.
    rest_s = max(large_s / 4, large_s - operation_s - LARGE_BYTES / 2 / memory)
    return {"memory": memory, "socket": LARGE_BYTES / rest_s, "operation_s": operation_s, "codecs": codecs}


if __name__ == "__main__":
    harness.run(measure)
