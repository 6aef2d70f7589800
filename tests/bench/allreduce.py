#!/usr/bin/env python3
"""All-reduce of float32 between the ranks of one host: milliseconds until the last rank has the result.

    python tests/bench/allreduce.py --ranks 4 2 --sizes 64K 1M 16M 64M

bagua: on tensors of ``bagua.empty`` (shared memory). bagua, copied: on ordinary tensors. Gloo: torch.distributed. All
in the same processes, turn by turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import harness

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    """``64M`` -> bytes."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def measure(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every round and variant. Operations shorter than a millisecond are repeated within a round."""
    import torch
    import torch.distributed as dist

    import bagua.torch_api as bagua

    count = nbytes // 4
    shared, ordinary, theirs = bagua.empty(count), torch.ones(count), torch.ones(count)
    shared.fill_(1)
    repeats = max(1, min(50, (4 << 20) // nbytes))

    def variant(operation: Callable[[], object]) -> Callable[[], float]:
        def measured() -> float:
            dist.barrier()
            return harness.slowest(harness.timed(lambda: [operation() for _ in range(repeats)]) / repeats)

        return measured

    variants = {
        "bagua": variant(lambda: bagua.allreduce_inplace(shared, op=bagua.ReduceOp.AVG)),
        "bagua, copied": variant(lambda: bagua.allreduce_inplace(ordinary, op=bagua.ReduceOp.AVG)),
        "gloo": variant(lambda: dist.all_reduce(theirs)),
    }
    found = harness.interleave(variants, rounds)
    assert shared.eq(1).all() and ordinary.eq(1).all()
    return found


def worker(result: Path, sizes: list[int], rounds: int) -> None:
    import torch.distributed as dist

    import bagua.torch_api as bagua

    bagua.init_process_group()
    dist.init_process_group("gloo")
    found = {str(nbytes): harness.medians(measure(nbytes, rounds)) for nbytes in sizes}
    if bagua.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--sizes", nargs="+", default=["4K", "64K", "1M", "16M", "64M"])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.smoke:
        options.ranks, options.sizes, options.rounds = [2], ["64K"], 2
    if options.worker:
        worker(options.worker, [size(text) for text in options.sizes], options.rounds)
        return
    rows = []
    for ranks in options.ranks:
        arguments = ["--rounds", str(options.rounds), "--sizes", *options.sizes]
        for nbytes, found in harness.launch(__file__, ranks, arguments).items():
            label = next(text for text in options.sizes if size(text) == int(nbytes))
            ratios = {f"gloo/{name}": round(found["gloo"] / found[name], 2) for name in ("bagua", "bagua, copied")}
            rows.append({"ranks": ranks, "size": label, **found, **ratios})
    harness.finish(options, rows, "ms, median of the slowest rank; ratios: how many times as fast as Gloo")


if __name__ == "__main__":
    main()
