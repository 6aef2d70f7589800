#!/usr/bin/env python3
"""The backend of torch.distributed beside Gloo: DDP's steps, FSDP2's steps, small all-reduces, in the same processes.
And steps of FSDP2 on islands beside those that exchange nothing between islands.

    python tests/bench/c10d.py                                   # all, about ten minutes
    python tests/bench/c10d.py --only ddp,fsdp --seconds 20
    python tests/bench/c10d.py --only network,few-bits,islands   # two hosts; needs root

Medians over turns, of the slowest rank; backends take turns, so that all see the same machine. What is promised of each
row stands beside it, and the best that there is to gain: Gloo's step over one that exchanges nothing ("silent": DDP
with a hook, FSDP2 over torch's group "fake").
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.algorithms.diloco import StreamingDiLoCoAlgorithm
from bagua.bench.ranks import harness
from bagua.bench.ranks.models import WORKLOADS, Transformer
from bagua.cli.bench import tasks
from bagua.tuning.network import Network, parse_network

ALONE, SILENT, OURS, GLOO, OWN, FEW = "alone", "silent", "bagua", "gloo", "bagua.torch_api", "int4"
DILOCO = "streaming_diloco int4"
MODELS = ("mlp", "resnet", "transformer")
TURN_S = 0.4  # a turn has as many steps as fit, at least one
MOST_STEPS = 200
OPERATIONS = 50
LEARNING_RATE = 1e-5


def groups():
    """A process group of all ranks for each backend."""
    importlib.import_module("bagua.c10d")  # torch before 2.5 does not do so by itself
    dist.init_process_group("bagua")
    return {OURS: dist.group.WORLD, GLOO: dist.new_group(backend="gloo")}


def turn_of(train, warm_up, fewest=1):
    """Seconds of a step of the slowest rank, each time it is called."""
    train(warm_up)
    steps = max(fewest, min(MOST_STEPS, int(TURN_S / harness.slowest(harness.seconds(lambda: train(1))))))

    def turn():
        bagua.barrier()
        return harness.slowest(harness.seconds(lambda: train(steps)) / steps)

    return turn


def trainer(model, loss_of, warm_up, algorithm=None):
    """A turn of steps of this model. ``algorithm``: wrapped with it; at least one period."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if algorithm is not None:
        model.with_bagua([optimizer], algorithm)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()

    return turn_of(train, warm_up, 1 if algorithm is None else algorithm.interval)


def ddp(config):
    """Median seconds of a step with DDP at its defaults on each backend; without DDP; and with DDP whose hook exchanges
    nothing: what a backend would reach that takes no time."""
    torch.manual_seed(0)
    workload = WORKLOADS[config["model"]](**config["sized"])
    turns = {ALONE: trainer(copy.deepcopy(workload.model), workload.loss_of, config["warm_up"])}
    for name, group in groups().items():
        model = DistributedDataParallel(copy.deepcopy(workload.model), process_group=group)
        turns[name] = trainer(model, workload.loss_of, config["warm_up"])
    silent = DistributedDataParallel(copy.deepcopy(workload.model))
    silent.register_comm_hook(None, kept)
    turns[SILENT] = trainer(silent, workload.loss_of, config["warm_up"])
    return harness.medians(harness.interleave(turns, config["seconds"], config["rounds"], warm=True))


def kept(_, bucket):  # DDP refuses annotations that are text
    """A hook of DDP that leaves gradients as they are."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def shard(model, mesh):
    """Shards it by layer."""
    from torch.distributed.fsdp import fully_shard

    layers = model.layers.layers if isinstance(model, Transformer) else model.children()
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def silent_group():
    """torch's group for its own tests, which exchanges nothing; none where this torch has it elsewhere."""
    try:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers it
    except ImportError:
        return {}
    return {SILENT: dist.new_group(backend="fake")}


def fsdp(config):
    """The same with FSDP2, sharded by layer; between hosts also with few bits."""
    from bagua.fsdp import compress

    torch.manual_seed(0)
    workload = WORKLOADS[config["model"]](**config["sized"])
    turns = {ALONE: trainer(copy.deepcopy(workload.model), workload.loss_of, config["warm_up"])}
    systems = {**groups(), **silent_group()}
    if config.get("few"):
        systems = {FEW: systems.pop(OURS), **systems}
    for name, group in systems.items():
        model = shard(copy.deepcopy(workload.model), DeviceMesh.from_group(group, "cpu"))
        if name == FEW:
            compress(model)
        turns[name] = trainer(model, workload.loss_of, config["warm_up"])
    return harness.medians(harness.interleave(turns, config["seconds"], config["rounds"], warm=True))


def islands(config):
    """The same of islands, each on a host, which exchange nothing, or fragments of their shards."""
    torch.manual_seed(bagua.get_island())
    workload = WORKLOADS[config["model"]](**config["sized"])
    mesh = init_device_mesh("cpu", (bagua.get_island_size(),))
    turns = {}
    for name, algorithm in ((SILENT, None), (DILOCO, StreamingDiLoCoAlgorithm())):
        model = shard(copy.deepcopy(workload.model), mesh)
        turns[name] = trainer(model, workload.loss_of, config["warm_up"], algorithm)
    return harness.medians(harness.interleave(turns, config["seconds"], config["rounds"], warm=True))


def operations(config):
    """Median seconds of one all-reduce of ``bytes`` bytes, in place."""
    tensor = torch.zeros(config["bytes"] // 4)
    made = groups()
    calls = {
        OURS: lambda: dist.all_reduce(tensor, group=made[OURS]),
        GLOO: lambda: dist.all_reduce(tensor, group=made[GLOO]),
        OWN: lambda: bagua.allreduce_inplace(tensor),
    }

    def repeated(call):
        def run(steps):
            for _ in range(steps):
                call()

        return run

    turns = {name: turn_of(repeated(call), OPERATIONS) for name, call in calls.items()}
    return harness.medians(harness.interleave(turns, config["seconds"], config["rounds"], warm=True))


KINDS = {"ddp": ddp, "fsdp": fsdp, "islands": islands, "operations": operations}


def measure(config):
    """Median seconds of each system."""
    found = KINDS[config["kind"]](config)
    dist.destroy_process_group()
    return {"seconds": found}


@dataclass(frozen=True)
class Case:
    """One measurement. ``least``: times as fast as Gloo that are promised; ``most_us``: over our own primitive;
    ``most``: times the step that exchanges nothing."""

    group: str
    name: str
    config: dict[str, Any]
    nnodes: int = 1
    nproc_per_node: int = 2
    network: Network | None = None
    least: float = 0.0
    most_us: float = 0.0
    most: float = 0.0


def cases():
    gigabit = parse_network("1gbit")
    made = [Case("ddp", f"DDP, {model}, 1 host x 2", {"kind": "ddp", "model": model}, least=1.3) for model in MODELS]
    made.append(Case("fsdp", "FSDP2, transformer, 1 host x 2", {"kind": "fsdp", "model": "transformer"}, least=1.3))
    for size, least, most_us in ((4, 20.0, 30.0), (64, 0.0, 30.0), (1024, 0.0, 0.0), (16384, 0.0, 0.0)):
        config = {"kind": "operations", "bytes": size << 10}
        made.append(
            Case("operations", f"all-reduce of {size} KiB, 1 host x 4", config, 1, 4, least=least, most_us=most_us)
        )
    made += [
        Case("network", f"DDP, {model}, 2 hosts x 1, 1 Gbit/s", {"kind": "ddp", "model": model}, 2, 1, gigabit, 1.0)
        for model in MODELS
    ]
    for model, least in (("mlp", 3.5), ("transformer", 0.0)):
        config = {"kind": "fsdp", "model": model, "few": True}
        made.append(Case("few-bits", f"FSDP2 int4, {model}, 2 hosts x 1, 1 Gbit/s", config, 2, 1, gigabit, least))
    config = {"kind": "islands", "model": "transformer", "island_size": 2}
    for rate in ("1gbit", "100mbit"):
        name = f"islands, transformer, 2 hosts x 2, {rate}/s"
        made.append(Case("islands", name, config, 2, 2, parse_network(rate), most=1.1))
    return made


def row_of(case, options):
    settings = {"seconds": options.seconds, "rounds": options.rounds, "warm_up": options.warm_up}
    sized = {"batch": options.batch, "length": options.length if case.config.get("model") == "transformer" else None}
    settings["sized"] = {name: size for name, size in sized.items() if size}
    env = {"OMP_NUM_THREADS": str(options.threads)}
    task = tasks.Task(__file__, {**case.config, **settings}, case.nnodes, case.nproc_per_node, env)
    found = tasks.measure(task, case.network)["seconds"]
    if DILOCO in found:
        times = found[DILOCO] / found[SILENT]
        return {"case": case.name, "seconds": found, "times_silent": times, "promised_most": case.most}
    ours = found[FEW if FEW in found else OURS]
    row = {"case": case.name, "seconds": found, "times_gloo": found[GLOO] / ours, "promised": case.least}
    if ALONE in found:
        # A backend that takes no time would be so many times as fast as Gloo; and how much less a step waits for ours.
        least = found.get(SILENT, found[ALONE])  # a torch without a group "fake" has no silent FSDP2
        row["possible"] = found[GLOO] / least
        row["overhead_of_gloo"] = (ours - least) / max(found[GLOO] - least, 1e-9)
    if OWN in found:
        row |= {"over_own_us": (ours - found[OWN]) * 1e6, "promised_us": case.most_us}
    return row


def show(row):
    seconds = row["seconds"]
    text = f"{row['case']:<38}" + "".join(f"{name} {1e3 * seconds[name]:9.3f} ms  " for name in seconds)
    if "times_silent" in row:
        return text + f"{row['times_silent']:6.2f} x silent (promised {row['promised_most']:g})"
    text += f"{row['times_gloo']:6.2f} x Gloo"
    if row["promised"]:
        text += f" (promised {row['promised']:g})"
    if "possible" in row:
        text += f", {row['possible']:.2f} without communication; {row['overhead_of_gloo']:.2f} of Gloo's overhead"
    if "over_own_us" in row:
        text += f", {row['over_own_us']:+.1f} us over our own"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="ddp,fsdp,operations,network,few-bits,islands", help="groups of cases, with commas"
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of turns, for each case")
    parser.add_argument("--rounds", type=int, default=5, help="the fewest")
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--batch", type=int, help="samples of a rank in a step (MLP and ResNet 32, transformer 8)")
    parser.add_argument("--length", type=int, help="tokens of a transformer's sample (128)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank's computation, as OMP_NUM_THREADS")
    options = parser.parse_args()
    wanted = options.only.split(",")
    for case in cases():
        if case.group not in wanted or case.config.get("model", options.models) not in options.models:
            continue
        if case.network is not None and os.geteuid() != 0:
            print(f"{case.name}: left out, needs root", file=sys.stderr)
            continue
        print(show(row_of(case, options)), flush=True)


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
