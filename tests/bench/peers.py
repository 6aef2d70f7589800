#!/usr/bin/env python3
"""All-reduce of float32 inside one host beside other systems: OpenMPI, torchft and Horovod where installed.

python tests/bench/peers.py --ranks 4 --sizes 64K,1M,16M,64M --rounds 3

Each round starts every system once, one after the other, so that all see the same machine; a figure is the median over
rounds of the medians of a start. A peer is any Python that has it: ``--python horovod=/path/to/python`` names one for a
peer; without it this Python is asked. What can't be imported is left out, and the table says so.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bagua.bench.units import parse_sizes

RANK_MAIN = Path(__file__).with_name("peer_rank.py")
PEERS = {"bagua": "bagua", "gloo": "torch", "openmpi": "mpi4py", "torchft": "torchft", "horovod": "horovod"}
START_DEADLINE_S = 300.0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def available(peer, python):
    """Whether this Python has the peer (and for MPI its launcher is there)."""
    if peer == "openmpi" and shutil.which("mpirun") is None:
        return False
    probe = subprocess.run([python, "-P", "-c", f"import {PEERS[peer]}"], capture_output=True, check=False)
    return probe.returncode == 0


def commands(peer, python, ranks, arguments):
    """The processes to start: one command per rank with its environment, or the peer's own launcher."""
    program = [python, "-P", str(RANK_MAIN), peer, *arguments]
    base = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if peer == "openmpi":
        launcher = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-np", str(ranks)]
        return [([*launcher, *program], base)]
    if peer == "horovod":
        launcher = [str(Path(python).with_name("horovodrun")), "-np", str(ranks)]
        return [([*launcher, "--gloo", "--network-interfaces", "lo", *program], base)]
    port = str(free_port())
    made = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        made.append((program, {**base, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}))
    return made


def measure(peer, python, ranks, sizes, log):
    """Median milliseconds per size of one start; None if it failed (the log says why)."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [str(result), ",".join(map(str, sizes))]
        with log.open("ab") as out:
            started = [
                subprocess.Popen(argv, env={**os.environ, **env}, stdout=out, stderr=out)
                for argv, env in commands(peer, python, ranks, arguments)
            ]
            try:
                codes = [process.wait(START_DEADLINE_S) for process in started]
            except subprocess.TimeoutExpired:
                codes = [1]
            finally:
                for process in started:
                    if process.poll() is None:
                        process.kill()
                        process.wait()
        if any(codes) or not result.exists():
            return None
        return {int(key): value for key, value in json.loads(result.read_text()).items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", default="64K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "bagua-peers.log")
    options = parser.parse_args()
    sizes = parse_sizes(options.sizes)
    pythons = dict(entry.split("=", 1) for entry in options.python)
    present = {peer: pythons.get(peer, sys.executable) for peer in PEERS}
    present = {peer: python for peer, python in present.items() if available(peer, python)}
    found = {peer: [] for peer in present}
    for number in range(options.rounds):
        for peer, python in present.items():
            print(f"round {number + 1} of {options.rounds}: {peer}", file=sys.stderr, flush=True)
            one = measure(peer, python, options.ranks, sizes, options.log)
            if one is not None:
                found[peer].append(one)
    medians = {
        peer: {key: statistics.median(one[key] for one in rounds) for key in sizes}
        for peer, rounds in found.items()
        if rounds
    }
    show(options.ranks, options.sizes.split(","), sizes, medians)
    for peer in PEERS:
        if peer not in present:
            print(f"{peer:<16} not installed")
        elif peer not in medians:
            print(f"{peer:<16} failed every time: see {options.log}")
    return 0 if "bagua" in medians else 1


def show(ranks, names, sizes, medians):
    """Milliseconds, and how many times as long as ours."""
    print(f"{f'ms, {ranks} ranks':<16}" + "".join(f"{name:>22}" for name in names))
    ours = medians.get("bagua", {})
    for peer, row in medians.items():
        cells = [f"{row[key]:.3g}" + (f" ({row[key] / ours[key]:.1f}x)" if ours else "") for key in sizes]
        print(f"{peer:<16}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
