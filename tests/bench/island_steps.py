#!/usr/bin/env python3
"""Steps of a sharded model on islands of two ranks, with and without `--elastic`, beside torch's HSDP over Gloo.

    python tests/bench/island_steps.py                          # 25 MB in six units, four ranks
    python tests/bench/island_steps.py --width 64 --rounds 20   # when there is nothing to compute

The jobs run beside each other and take turns of some steps, so that all see the same machine. ms: median over turns, of
the slowest rank. speed: median over rounds of HSDP's time by this one's. faults: pages that a step faults in on a rank.
MB: the largest memory that a rank has touched, with all that it has imported.
"""

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time

SYSTEMS = ("hsdp", "islands", "elastic islands")
WAIT_S = 180.0


def rank_main(options):
    """The program of a rank: so many steps each time that the driver asks for some."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    hsdp = options.system == "hsdp"
    if hsdp:
        torch.distributed.init_process_group("gloo")
        copies = torch.distributed.get_world_size() // 2
        mesh = init_device_mesh("cpu", (copies, 2), mesh_dim_names=("replicate", "shard"))
    else:
        import bagua.torch_api as bagua

        bagua.init_process_group()
        mesh = init_device_mesh("cpu", (bagua.get_island_size(),))
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(options.layers)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if not hsdp:
        model.with_bagua([optimizer])
    inputs = torch.randn(16, width)
    with socket.create_connection(("127.0.0.1", options.port)) as connection:
        driver = connection.makefile("rw")
        print("ready", file=driver, flush=True)
        for line in driver:
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            for _ in range(int(line)):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            seconds, after = (time.perf_counter() - began) / int(line), resource.getrusage(resource.RUSAGE_SELF)
            faults = (after.ru_minflt - before.ru_minflt) / int(line)
            print(json.dumps([seconds, faults, after.ru_maxrss / 1e3]), file=driver, flush=True)


@contextlib.contextmanager
def job(system, options):
    """A function that has all ranks of it make some steps, and returns (seconds, faults, MB) of the worst."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        if system == "hsdp":
            start = ["torch.distributed.run", "--standalone"]
        else:
            start = ["bagua.cli.main", "run", "--quiet", "--island-size", "2"] + ["--elastic"] * ("elastic" in system)
        command = [sys.executable, "-P", "-m", *start, "--nproc-per-node", str(options.ranks), __file__]
        command += ["--system", system, "--port", str(server.getsockname()[1])]
        command += ["--width", str(options.width), "--layers", str(options.layers)]
        process = subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
        stack.callback(process.wait, WAIT_S)
        server.settimeout(WAIT_S)
        ranks = []
        for _ in range(options.ranks):
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(WAIT_S)
            ranks.append(stack.enter_context(connection.makefile("rw")))
            ranks[-1].readline()

        def turn():
            for rank in ranks:
                print(options.steps, file=rank, flush=True)
            return tuple(map(max, zip(*(json.loads(rank.readline()) for rank in ranks), strict=True)))

        yield turn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024, help="of the layers, in float32")
    parser.add_argument("--layers", type=int, default=6, help="each is a unit of FSDP")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.system:
        return rank_main(options)
    found = {system: [] for system in SYSTEMS}
    with contextlib.ExitStack() as stack:
        turns = {system: stack.enter_context(job(system, options)) for system in SYSTEMS}
        for number in range(options.rounds + 1):
            for system in SYSTEMS[:: 1 if number % 2 else -1]:
                turn = turns[system]()
                if number:
                    found[system].append(turn)
    print(f"{'':<18}{'ms':>8}{'speed':>8}{'faults':>8}{'MB':>8}")
    for system, rounds in found.items():
        seconds, faults, megabytes = (statistics.median(column) for column in zip(*rounds, strict=True))
        speed = statistics.median(peer[0] / own[0] for peer, own in zip(found["hsdp"], rounds, strict=True))
        print(f"{system:<18}{1e3 * seconds:>8.1f}{speed:>8.2f}{faults:>8.0f}{megabytes:>8.0f}", flush=True)
    return None


if __name__ == "__main__":
    main()
