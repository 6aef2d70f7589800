#!/usr/bin/env python3
"""Training steps with ``step_in_backward=True`` beside those without, between two emulated hosts. Needs root.

    python tests/bench/backward_steps.py                          # ResNet-18 at 1 Gbit/s, four optimizers
    python tests/bench/backward_steps.py --model transformer --network 100mbit
    python tests/bench/backward_steps.py --network none           # two daemons over loopback; no root

Both take turns, step by step. "Times as fast": the median of the ratios of neighbours.
"""

import argparse
import statistics
import time

import torch

import bagua.torch_api as bagua
from bagua.bench.ranks import harness
from bagua.bench.ranks.models import WORKLOADS
from bagua.bench.report import markdown
from bagua.cli.bench import tasks
from bagua.tuning.network import parse_network

OPTIMIZERS = {
    "SGD": lambda some: torch.optim.SGD(some, lr=1e-4),
    "SGD, momentum": lambda some: torch.optim.SGD(some, lr=1e-4, momentum=0.9),
    "Adam": lambda some: torch.optim.Adam(some, lr=1e-6),
    "Adam, foreach": lambda some: torch.optim.Adam(some, lr=1e-6, foreach=True),
}


class Trained:
    """Model with its optimizer. ``optimizer_s``: of each step, in ``optimizer.step()``."""

    def __init__(self, model, optimizer, early):
        torch.manual_seed(0)
        self._work = WORKLOADS[model]()
        self._optimizer = OPTIMIZERS[optimizer](self._work.model.parameters())
        wrapped = self._work.model
        self._model = wrapped.with_bagua([self._optimizer], step_in_backward=early)
        self.optimizer_s = []

    def step(self):
        """Seconds of one step of the slowest rank."""
        bagua.barrier()
        return harness.slowest(harness.seconds(self._train))

    def _train(self):
        self._optimizer.zero_grad()
        self._work.loss_of(self._model).backward()
        begin = time.perf_counter()
        self._optimizer.step()
        self.optimizer_s.append(time.perf_counter() - begin)

    def close(self):
        """Ends the model's exchange of gradients."""
        self._model.bagua_ddp.close()


def measure(config):
    """A row for each optimizer: medians of steps in turn, and of the ratio of neighbours."""
    rows = []
    for optimizer in config["optimizers"]:
        behind, inside = (Trained(config["model"], optimizer, early) for early in (False, True))
        seconds = []
        for number in range(config["steps"] + config["warm_up"]):
            first, second = (behind, inside) if number % 2 else (inside, behind)
            taken = {first: first.step(), second: second.step()}
            if number >= config["warm_up"]:
                seconds.append((taken[behind], taken[inside]))
        behind.close()
        inside.close()
        share = statistics.median(behind.optimizer_s) / statistics.median(one for one, _ in seconds)
        rows.append(
            {
                "optimizer": optimizer,
                "optimizer's share": round(share, 3),
                "behind, ms": round(1e3 * statistics.median(one for one, _ in seconds), 1),
                "inside, ms": round(1e3 * statistics.median(other for _, other in seconds), 1),
                "times as fast": round(statistics.median(one / other for one, other in seconds), 3),
            }
        )
    return {"rows": rows}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="resnet")
    options.add_argument("--network", default="1gbit", help="as `bagua bench train --emulate` has it, or none")
    options.add_argument("--optimizers", default="SGD;SGD, momentum;Adam;Adam, foreach", help="with semicolons")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--warm-up", type=int, default=4)
    given = options.parse_args()
    config = {**vars(given), "optimizers": given.optimizers.split(";")}
    network = None if given.network == "none" else parse_network(given.network)
    task = tasks.Task(__file__, config, 2, 1, {"OMP_NUM_THREADS": "1"}, quiet=True)
    print(markdown(tasks.measure(task, network)["rows"]))


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
