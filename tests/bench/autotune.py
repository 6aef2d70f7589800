#!/usr/bin/env python3
"""Jobs that tune themselves, beside defaults and an exhaustive search of the same space. Emulated networks need root.

    python tests/bench/autotune.py --cases resnet@none resnet@1gbit mlp@1gbit,5ms
    python tests/bench/autotune.py --cases mlp@100mbit --no-exhaustive        # each step takes seconds there
    python tests/bench/autotune.py --cases resnet@1gbit --bucket-bytes 100000000    # from bad defaults: one bucket

A case is a model of ``bagua bench train`` on a network between two hosts, or on one host (``none``).
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from bagua.cli.bench.tasks import Task, measure
from bagua.tuning.network import parse_network

CASES = [
    *("mlp@none", "resnet@none", "transformer-s@none"),
    *(
        f"{model}-s@{network}"
        for network in ("1gbit", "1gbit,5ms", "100mbit")
        for model in ("mlp", "resnet", "transformer")
    ),
]


def run_case(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """The row of one case."""
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
    if given.log:
        env["BAGUA_IS_OUTPUT_AUTOTUNE_LOG"] = "1"
    task = Task("bagua.bench.ranks.autotune", config, hosts, 2 // hosts, env, quiet=not given.log)
    row: dict[str, Any] = measure(task, network)["rows"][0]
    return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL@NETWORK")
    options.add_argument("--most", type=int, default=320, help="steps until the job must have settled")
    options.add_argument("--steps", type=int, default=3, help="of one block")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--bucket-bytes", type=int, default=0, help="of the defaults; 0: those of the library")
    options.add_argument("--no-exhaustive", action="store_true")
    options.add_argument("--log", action="store_true", help="a line for each candidate")
    options.add_argument("--output", choices=["text", "json"], default="text")
    given = options.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    for number, case in enumerate(given.cases):
        row = run_case(case, given)
        if given.output == "json":
            print(json.dumps(row), flush=True)
            continue
        if not number:
            print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)


if __name__ == "__main__":
    main()
