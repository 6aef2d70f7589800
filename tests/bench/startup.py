#!/usr/bin/env python3
"""How long a start takes: worlds of processes that nothing has started a daemon for, beside Gloo, and ``bagua run``.

    python tests/bench/startup.py
    python tests/bench/startup.py --beside OTHER/.venv/bin/python     # another version in turns with this one

A world is ``init_process_group``, one all-reduce and ``destroy_process_group`` in processes that have imported torch
and the library. The first world of the processes brings up a daemon, and further ones have it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

RUN_DEADLINE_S = 600.0
FURTHER = 3
WORLDS = "--worlds"
WAYS = ("gloo", "bagua", "bagua.torch_api")
"""Backends of torch.distributed, and our own interface."""


def run(script, arguments, env):
    """Seconds of one ``bagua run``."""
    command = [sys.executable, "-P", "-m", "bagua.cli.main", "run", "--quiet", *arguments, str(script)]
    started = time.perf_counter()
    subprocess.run(command, env={**os.environ, **env}, check=True, timeout=RUN_DEADLINE_S)
    return time.perf_counter() - started


def begin_worlds(way, ranks):
    """In a process of its own: prints the seconds of each world, as rank 0 sees them."""
    import torch.multiprocessing as mp

    if way != "gloo":
        import bagua.c10d.backend
        import bagua.torch_api  # noqa: F401 - its import is no part of a world
        from bagua import csrc

        csrc.load()  # built, if it was not
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(ranks, folder, way), nprocs=ranks, start_method="fork")


def _rank(rank, ranks, folder, way):
    import torch
    import torch.distributed as dist

    seconds = []
    for number in range(1 + FURTHER):
        store = dist.FileStore(f"{folder}/{number}", ranks)
        values = torch.ones(4)
        began = time.perf_counter()
        if way == "bagua.torch_api":
            import bagua.torch_api as bagua

            bagua.init_process_group(store, rank, ranks, ranks)
            bagua.allreduce_inplace(values)
            bagua.destroy_process_group()
        else:
            dist.init_process_group(way, store=store, rank=rank, world_size=ranks)
            dist.all_reduce(values)
            dist.destroy_process_group()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps(seconds), flush=True)


def worlds(rounds, ranks, beside):
    """The versions and ways in turns."""
    pythons = {"": sys.executable, **({"other: ": beside} if beside else {})}
    found = defaultdict(list)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for version, python in pythons.items():
            for way in WAYS:
                command = [python, "-P", str(Path(__file__).absolute()), WORLDS, way, str(ranks)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_DEADLINE_S)
                first, *further = json.loads(done.stdout)
                found[f"{version}{way}, first world"].append(first)
                found[f"{version}{way}, further worlds"] += further
    return [(what, statistics.median(values)) for what, values in sorted(found.items())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="of a world")
    parser.add_argument("--beside", default="", metavar="PYTHON", help="interpreter with another version of Bagua")
    parser.add_argument("--no-cold", action="store_true", help="don't build a core")
    parser.add_argument(WORLDS, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worlds:
        begin_worlds(options.worlds[0], int(options.worlds[1]))
        return
    rows = worlds(options.rounds, options.ranks, options.beside)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "nothing.py"
        script.write_text("")
        run(script, [], {})  # whatever was cold is warm now
        shapes = {"1 x 1": [], "2 x 2": ["--nnodes", "2", "--nproc-per-node", "2"]}
        for shape, arguments in shapes.items():
            values = [run(script, arguments, {}) for _ in range(options.rounds)]
            rows.append((f"bagua run, warm, {shape} ranks", statistics.median(values)))
        if not options.no_cold:
            cold = run(script, [], {"BAGUA_CACHE_DIR": str(Path(folder) / "cache")})
            rows.append(("bagua run, cold, 1 x 1 ranks", cold))
    for what, seconds in rows:
        print(f"{what:<42} {seconds:.3f} s")


if __name__ == "__main__":
    main()
