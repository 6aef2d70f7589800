"""Helpers of the ranks' programs: configuration in, results out, rounds in which systems take turns."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.bench.units import RESULT_MARK

FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
GLOO = "gloo"


def run(
    measure: Callable[[dict[str, Any]], dict[str, Any] | None],
    unset: Mapping[str, tuple[object, Sequence[str]]] | None = None,
) -> None:
    """The main program of a rank: joins the job, measures, and lets rank 0 write what ``measure`` returned there.

    ``unset``: key of the configuration -> (value, variables of the environment that must not be set if it has it).
    """
    config, result = json.loads(sys.argv[1]), sys.argv[2]
    for key, (value, names) in (unset or {}).items():
        if config.get(key) == value:
            start_again_without(names)
            os.environ["BAGUA_KEEP_MEMORY"] = "0"  # nor does the library set what these variables would
    if config.get("island_size", 1) == 1:  # islands are torch's world
        os.environ["BAGUA_TORCH_DISTRIBUTED"] = "0"  # the peer that is measured is started by start_gloo
    torch.set_num_threads(int(config.get("threads", 1)))
    bagua.init_process_group()
    found = measure(config)
    if bagua.get_rank() == 0 and found is not None:
        _write(found, result)
    bagua.barrier()
    bagua.destroy_process_group()


def on_rank() -> bool:
    """True in a rank of a job. A program that starts itself as the job (Task) measures there."""
    return "RANK" in os.environ


def _write(found: dict[str, Any], result: str) -> None:
    text = json.dumps(found)
    if result == "-":
        print(RESULT_MARK + text, flush=True)
        return
    temporary = Path(f"{result}.new")  # a file of this name is whole
    temporary.write_text(text)
    temporary.rename(result)


def start_gloo() -> None:
    """The peer: torch.distributed over Gloo, in the same processes. The launcher set address and port."""
    import torch.distributed as dist

    dist.init_process_group(GLOO)


def stop_gloo() -> None:
    """Leaves the peer's group, if it was started."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def seconds(action: Callable[[], object]) -> float:
    """Seconds that ``action`` takes on this rank."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def slowest(value: float) -> float:
    """The largest of all ranks' values: an operation is over when the last rank has its result. Every rank calls it."""
    tensor = torch.tensor([value], dtype=torch.float64)
    bagua.allreduce_inplace(tensor, op=bagua.ReduceOp.MAX)
    return tensor.item()


def rounds_within(budget_s: float, round_s: float, fewest: int = FEWEST_ROUNDS) -> int:
    """Returns how many rounds fit into the budget, the same on every rank if ``round_s`` is."""
    return max(fewest, min(MOST_ROUNDS, int(budget_s / max(round_s, 1e-9))))


def interleave(
    variants: Mapping[str, Callable[[], float]], budget_s: float, fewest: int = FEWEST_ROUNDS, warm: bool = False
) -> dict[str, list[float]]:
    """Lets every variant run once per round, in an order that turns, until about ``budget_s`` have passed. The first
    round is not counted, unless variants are ``warm``. Each returns the value of one run. Every rank calls it."""
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in names}

    def round_from(start: int) -> None:
        for name in names[start:] + names[:start]:
            found[name].append(variants[name]())

    first = slowest(seconds(lambda: round_from(0)))
    if not warm:
        found = {name: [] for name in names}
    for turn in range(int(warm), rounds_within(budget_s, first, fewest)):  # a first round that counts is one of them
        round_from(turn % len(names))
    return found


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def progress(step: int, total: int, message: str) -> None:
    """Tells the command line how far rank 0 is."""
    if bagua.get_rank() == 0:
        bagua.communication.report(step, total, message=message)


def start_again_without(names: Sequence[str]) -> None:
    """Starts this program again without these variables of the environment, if there are any: some are read before the
    first line of a program. The process stays the same."""
    if any(name in os.environ for name in names):
        for name in names:
            os.environ.pop(name, None)
        # ``sys.argv`` lacks -m, and Python's own options.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
