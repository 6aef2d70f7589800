#!/usr/bin/env python3
"""Jobs that tune themselves, beside defaults and an exhaustive search of the same space. Emulated networks need root.

    python tests/bench/autotune.py --cases resnet@none resnet@1gbit mlp@1gbit,5ms
    python tests/bench/autotune.py --cases mlp@100mbit --no-exhaustive        # each step takes seconds there
    python tests/bench/autotune.py --cases resnet@1gbit --bucket-bytes 100000000    # from bad defaults: one bucket

A case is a model of ``bagua bench train`` on a network between two hosts, or on one host (``none``).
"""

import argparse
import itertools
import os
import statistics
import time

import torch

import bagua.torch_api as bagua
from bagua.bench.ranks import harness
from bagua.bench.ranks.models import WORKLOADS
from bagua.bench.report import markdown
from bagua.cli.bench import tasks
from bagua.torch_api.comm.coalesced import broadcast_object
from bagua.torch_api.tune import NEVER
from bagua.tuning.decision import Phase, text
from bagua.tuning.network import parse_network

CASES = [
    *("mlp@none", "resnet@none", "transformer-s@none"),
    *(
        f"{model}-s@{network}"
        for network in ("1gbit", "1gbit,5ms", "100mbit")
        for model in ("mlp", "resnet", "transformer")
    ),
]


class Trained:
    """Model under training. ``tuner``: that of ``bagua.torch_api.tune``."""

    def __init__(self, model):
        torch.manual_seed(0)
        self._work = WORKLOADS[model]()
        self._optimizer = torch.optim.SGD(self._work.model.parameters(), lr=1e-4, momentum=0.9)
        wrapped = self._work.model
        self._model = wrapped.with_bagua([self._optimizer], autotune=True)
        self.tuner = self._model.bagua_ddp._tuner

    def step(self):
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        self._work.loss_of(self._model).backward()
        self._optimizer.step()
        return time.perf_counter() - begin

    def settle(self, most):
        """Trains until nothing more is tried; returns after how many steps, and the setting."""
        for number in range(most):
            self.step()
            decider = self.tuner._decider
            settled = torch.tensor([float(decider is not None and decider.phase is Phase.SETTLED)])
            if number % 10 == 9:
                bagua.allreduce_inplace(settled, bagua.ReduceOp.MAX)
                if settled.item():
                    break
        steps = 0 if decider is None else decider.steps
        self.tuner._due = NEVER  # nothing is tried while settings are compared
        found = dict(self.tuner._present) if decider is None else dict(decider.present)
        bagua.broadcast(count := torch.tensor([float(steps)]), 0)
        return int(count.item()), dict(broadcast_object(found, 0))

    def block(self, setting, steps):
        """Median of steps with this setting; the first one, before which buckets are cut, does not count."""
        self.tuner._settings.apply(setting)
        self.step()
        return statistics.median(harness.slowest(self.step()) for _ in range(steps))


def measure(config):
    """Returns one row: what was found, after how many steps, and the ratio of its step time to that of the defaults and
    of the best of the space.
    """
    trained = Trained(config["model"])
    steps, found = trained.settle(config["most"])
    pairs = [
        (trained.block({}, config["steps"]), trained.block(found, config["steps"])) for _ in range(config["pairs"])
    ]
    space = trained.tuner._settings.space({}, config["hosts"])
    settings = [
        dict(zip([one.name for one in space], values, strict=True))
        for values in itertools.product(*(one.choices for one in space))
    ]
    ratios = []
    for number, setting in enumerate(settings if config["exhaustive"] else []):
        if number % 4 == 0:
            base = trained.block({}, config["steps"])
        ratios.append((trained.block(setting, config["steps"]) / base, setting))
    ratios.sort(key=lambda one: one[0])
    # The few that looked best are measured again beside what was found: one of many is fast by chance.
    again = [
        [trained.block(setting, config["steps"]) for setting in (found, *(one for _, one in ratios[:3]))]
        for _ in range(config["pairs"] if ratios else 0)
    ]
    medians = [statistics.median(column) for column in zip(*again, strict=True)]
    shown = [found, *(setting for _, setting in ratios[:3])]
    row = {
        "model": config["model"],
        "network": config["network"],
        "defaults, ms": round(1e3 * statistics.median(one for one, _ in pairs), 1),
        "found": text(found),
        "steps to settle": steps,
        "found / defaults": round(statistics.median(other / one for one, other in pairs), 3),
        "best of all": text(shown[medians.index(min(medians))]) if medians else None,
        "found / best": round(medians[0] / min(medians), 3) if medians else None,
        "space": len(settings),
    }
    return {"rows": [row]}


def run_case(case, given):
    model, _, name = case.partition("@")
    network = None if name == "none" else parse_network(name)
    hosts = 1 if network is None else 2
    config = {
        "model": model,
        "network": "one host" if network is None else name,
        "hosts": hosts,
        "most": given.most,
        "steps": given.steps,
        "pairs": given.pairs,
        "exhaustive": not given.no_exhaustive,
    }
    env = {"OMP_NUM_THREADS": "1"}
    if given.bucket_bytes:
        env["BAGUA_DEFAULT_BUCKET_SIZE"] = str(given.bucket_bytes)
    task = tasks.Task(__file__, config, hosts, 2 // hosts, env, quiet=True)
    return tasks.measure(task, network)["rows"][0]


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL@NETWORK")
    options.add_argument("--most", type=int, default=320, help="steps until the job must have settled")
    options.add_argument("--steps", type=int, default=3, help="of one block")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--bucket-bytes", type=int, default=0, help="of the defaults; 0: those of the library")
    options.add_argument("--no-exhaustive", action="store_true")
    given = options.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    for number, case in enumerate(given.cases):
        lines = markdown([run_case(case, given)]).splitlines()
        print("\n".join(lines if number == 0 else lines[2:]), flush=True)


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
