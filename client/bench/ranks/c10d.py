"""``torch.distributed`` over the backend "bagua" and over Gloo, in the same processes: training steps of DDP and FSDP2,
and single operations, these beside the library's own primitive, too."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.bench.ranks import harness
from bagua.bench.ranks.models import WORKLOADS, Transformer

TURN_S = 0.4  # a turn has as many steps as fit, at least one
MOST_STEPS = 200
OPERATIONS = 50
ALONE, SILENT, OURS, GLOO, OWN = "alone", "silent", "bagua", "gloo", "bagua.torch_api"
LEARNING_RATE = 1e-5


def groups() -> dict[str, Any]:
    """A process group of all ranks for each backend."""
    importlib.import_module("bagua.c10d")  # torch before 2.5 does not do so by itself
    dist.init_process_group("bagua")
    return {OURS: dist.group.WORLD, GLOO: dist.new_group(backend="gloo")}


def turn_of(train: Callable[[int], None], warm_up: int) -> Callable[[], float]:
    """Seconds of a step of the slowest rank, each time it is called."""
    train(warm_up)
    steps = max(1, min(MOST_STEPS, int(TURN_S / harness.slowest(harness.seconds(lambda: train(1))))))

    def turn() -> float:
        bagua.barrier()
        return harness.slowest(harness.seconds(lambda: train(steps)) / steps)

    return turn


def trainer(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], warm_up: int) -> Callable[[], float]:
    """A turn of steps of this model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return turn_of(train, warm_up)


def ddp(config: dict[str, Any]) -> dict[str, float]:
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


def kept(_, bucket):  # type: ignore[no-untyped-def] # DDP refuses annotations that are text
    """A hook of DDP that leaves gradients as they are."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def silent_group() -> dict[str, Any]:
    """torch's group for its own tests, which exchanges nothing; none where this torch has it elsewhere."""
    try:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers it
    except ImportError:
        return {}
    return {SILENT: dist.new_group(backend="fake")}


def fsdp(config: dict[str, Any]) -> dict[str, float]:
    """The same with FSDP2, sharded by layer."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    workload = WORKLOADS[config["model"]](**config["sized"])
    turns = {ALONE: trainer(copy.deepcopy(workload.model), workload.loss_of, config["warm_up"])}
    for name, group in {**groups(), **silent_group()}.items():
        mesh = DeviceMesh.from_group(group, "cpu")
        model = copy.deepcopy(workload.model)
        layers = model.layers.layers if isinstance(model, Transformer) else model.children()
        for layer in layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        turns[name] = trainer(model, workload.loss_of, config["warm_up"])
    return harness.medians(harness.interleave(turns, config["seconds"], config["rounds"], warm=True))


def operations(config: dict[str, Any]) -> dict[str, float]:
    """Median seconds of one all-reduce of ``bytes`` bytes, in place."""
    tensor = torch.zeros(config["bytes"] // 4)
    made = groups()
    calls: dict[str, Callable[[], object]] = {
        OURS: lambda: dist.all_reduce(tensor, group=made[OURS]),
        GLOO: lambda: dist.all_reduce(tensor, group=made[GLOO]),
        OWN: lambda: bagua.allreduce_inplace(tensor),
    }

    def repeated(call: Callable[[], object]) -> Callable[[int], None]:
        def run(steps: int) -> None:
            for _ in range(steps):
                call()

        return run

    turns = {name: turn_of(repeated(call), OPERATIONS) for name, call in calls.items()}
    return harness.medians(harness.interleave(turns, config["seconds"], config["rounds"], warm=True))


KINDS = {"ddp": ddp, "fsdp": fsdp, "operations": operations}


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of each system."""
    found = KINDS[config["kind"]](config)
    dist.destroy_process_group()
    return {"seconds": found}


if __name__ == "__main__":
    harness.run(measure)
