#!/usr/bin/env python3
"""Training steps with ``step_in_backward=True`` beside those without, between two emulated hosts. Needs root.

    python tests/bench/backward_steps.py                          # ResNet-18 at 1 Gbit/s, four optimizers
    python tests/bench/backward_steps.py --model transformer --network 100mbit --output json
    python tests/bench/backward_steps.py --network none           # two daemons over loopback; no root

Both take turns, step by step. "Times as fast": the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json

from bagua.cli.bench.tasks import Task, measure
from bagua.tuning.network import parse_network


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="resnet")
    options.add_argument("--network", default="1gbit", help="as `bagua bench train --emulate` has it, or none")
    options.add_argument("--optimizers", default="SGD;SGD, momentum;Adam;Adam, foreach", help="with semicolons")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--warm-up", type=int, default=4)
    options.add_argument("--output", choices=["text", "json"], default="text")
    given = options.parse_args()
    config = {
        "model": given.model,
        "optimizers": given.optimizers.split(";"),
        "steps": given.steps,
        "warm_up": given.warm_up,
    }
    network = None if given.network == "none" else parse_network(given.network)
    task = Task("bagua.bench.ranks.backward_steps", config, 2, 1, {"OMP_NUM_THREADS": "1"}, quiet=True)
    rows = measure(task, network)["rows"]
    if given.output == "json":
        print(json.dumps(rows))
        return
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


if __name__ == "__main__":
    main()
