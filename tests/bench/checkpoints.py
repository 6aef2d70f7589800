#!/usr/bin/env python3
"""Measures the cost of a checkpoint in the background.

    python tests/bench/checkpoints.py                                  # the transformer, 2 ranks of one host
    python tests/bench/checkpoints.py --model mlp --steps 20 --rounds 5

Windows of ``--steps`` steps take turns: with one checkpoint, begun after the first step and on the disk before the
window ends, and without. The difference is what a checkpoint costs; divided by a minute it is the share of training at
one checkpoint a minute. Figures are medians over pairs of windows.

``cpu_s`` is processor time of a rank: that of the copy, and of all threads beside the training's. Where each rank has a
core and keeps it busy, a checkpoint can't cost less; it does not depend on what else runs on the machine.
"""

import argparse
import statistics
import tempfile
import time

import torch

import bagua.torch_api as bagua
from bagua.bench.ranks import harness
from bagua.bench.ranks.models import WORKLOADS
from bagua.cli.bench import tasks

MINUTE_S = 60.0


def measure(config):
    """The row, of a rank."""
    torch.manual_seed(bagua.get_rank())
    workload = WORKLOADS[config["model"]]()
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=1e-4, foreach=True)
    model = workload.model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(config["folder"], every=1 << 40, keep=1)
    blocked = []
    copies = []
    beside = {True: [], False: []}

    def save():
        begun = time.thread_time()
        checkpointer.save()
        copies.append(time.thread_time() - begun)

    def window(saves):
        def steps():
            for number in range(config["steps"]):
                optimizer.zero_grad()
                workload.loss_of(model).backward()
                optimizer.step()
                checkpointer.step()
                if saves and number == 0:
                    blocked.append(harness.slowest(harness.seconds(save)))
            if saves:
                checkpointer.wait()

        bagua.barrier()
        begun = time.process_time() - time.thread_time()
        found = harness.slowest(harness.seconds(steps))
        beside[saves].append(time.process_time() - time.thread_time() - begun)
        return found

    window(True)  # memory is taken, files are made
    blocked.clear(), copies.clear(), beside[True].clear()
    pairs = []
    for turn in range(config["rounds"]):
        found = {saves: window(saves) for saves in ((True, False) if turn % 2 else (False, True))}
        pairs.append((found[False], found[True]))
    cost = [after - before for before, after in pairs]
    elements = sum(parameter.numel() for parameter in workload.model.parameters())
    return {
        "model": config["model"],
        "megabytes": 3 * 4 * elements / 1e6,
        "step_ms": 1e3 * statistics.median(before for before, _ in pairs) / config["steps"],
        "blocked_ms": 1e3 * statistics.median(blocked),
        "cost_s": statistics.median(cost),
        "costs_s": [round(one, 3) for one in cost],
        "cpu_s": sum(map(statistics.median, (copies, beside[True]))) - statistics.median(beside[False]),
        "percent_at_one_a_minute": 100 * statistics.median(cost) / MINUTE_S,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--steps", type=int, default=12, help="of one window")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of windows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as here:
        config = {**vars(options), "folder": f"{here}/checkpoints"}
        task = tasks.Task(__file__, config, 1, options.nproc_per_node, quiet=True)
        row = tasks.measure(task, None)
    print(f"{row['model']}: {row['megabytes']:.0f} MB, a step takes {row['step_ms']:.0f} ms")
    print(f"a checkpoint stops the training for {row['blocked_ms']:.0f} ms, and costs {row['cost_s']:.2f} s in all")
    print(f"at one a minute: {row['percent_at_one_a_minute']:.2f} % of the training; pairs, s: {row['costs_s']}")
    print(f"processor time of a rank: {row['cpu_s']:.2f} s, {100 * row['cpu_s'] / MINUTE_S:.2f} % of a minute")


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
