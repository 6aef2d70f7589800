"""One rank of ``elastic_peers.py`` and ``elastic_pauses.py``: trains a model of so many megabytes until it is killed.

``elastic_rank.py SYSTEM FOLDER MEGABYTES CHECKPOINT_EVERY``

BENCH_TIMEOUT_S in the environment: how long an operation of torchrun's process group may take; without it, torch's
default.

Each rank writes a line for each step that counts into a file of its own in FOLDER: ``steps-PID``, with the monotonic
time in nanoseconds, the number of the step, how many ranks take part, and how many steps it has tried in all.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

WIDTH, BATCH = 1000, 4


class Diary:
    """The lines of this rank. A line is written at once, so that it stays when the rank is killed."""

    def __init__(self, folder):
        self._file = (folder / f"steps-{os.getpid()}").open("w", buffering=1)
        self.tried = 0

    def tell(self, step, ranks):
        self._file.write(f"{time.monotonic_ns()} {step} {ranks} {self.tried}\n")


def make_model(megabytes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(megabytes // 4)))


def sharded(model, mesh):
    """The model, by FSDP2 with each layer as a unit."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model, inputs):
    functional.mse_loss(model(inputs), inputs).backward()


def bagua(diary, folder, megabytes, _):
    import bagua.torch_api as bagua

    bagua.init_process_group()
    model = make_model(megabytes)
    if bagua.get_island_size() > 1:
        sharded(model, init_device_mesh("cpu", (bagua.get_island_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model = model.with_bagua([optimizer])
    inputs, progress = torch.randn(BATCH, WIDTH), Progress()
    bagua.register_state("progress", progress)
    while True:
        bagua.wait_to_join()
        diary.tried += 1
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()
        progress.step += 1
        diary.tell(progress.step, bagua.get_world_size())


class Progress:
    """Number of the last step: newcomers take it over."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def torchrun(diary, folder, megabytes, every):
    """As its documentation says: rank 0 saves a checkpoint from time to time, and all begin with the last one."""
    import torch.distributed as dist

    limit = os.environ.get("BENCH_TIMEOUT_S")
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(limit)) if limit else None)
    model, checkpoint, step = make_model(megabytes), folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = nn.parallel.DistributedDataParallel(model)
    inputs = torch.randn(BATCH, WIDTH)
    while True:
        diary.tried += 1
        optimizer.zero_grad()
        backward(wrapped, inputs)
        optimizer.step()
        step += 1
        diary.tell(step, dist.get_world_size())
        if step % every == 0 and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step}, folder / "new.pt")
            (folder / "new.pt").replace(checkpoint)


def torchft(diary, folder, megabytes, _):
    """As in its train_ddp.py: a replica group is one rank, or several that shard the model. With its plain wrapper:
    the hook of the other one (0.2.0) ends a rank with an AssertionError where a neighbour is lost while it runs."""
    from torch.distributed import PrefixStore, TCPStore, init_process_group
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    model, rank, size = make_model(megabytes), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)
    if size > 1:  # as in its fsdp_test.py
        init_process_group("gloo", store=PrefixStore("world", store), rank=rank, world_size=size)
        sharded(model, init_device_mesh("cpu", (size,)))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)

    def parts():
        return {name: one.to_local() if size > 1 else one for name, one in model.state_dict().items()}

    def load(state):
        for name, one in parts().items():
            one.copy_(state["model"][name])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": parts(), "optimizer": inner.state_dict()},
        replica_id=f"group_{os.environ['GROUP']}",
        timeout=timedelta(seconds=30),
        hostname="127.0.0.1",
        rank=rank,
        world_size=size,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    if size > 1:
        for unit in (*model, model):
            unit.set_all_reduce_hook(lambda gradient: manager.allreduce(gradient).wait())
    wrapped = model if size > 1 else PureDistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    inputs, committed = torch.randn(BATCH, WIDTH), 0
    while True:
        diary.tried += 1
        optimizer.zero_grad()
        backward(wrapped, inputs)
        optimizer.step()
        if manager.current_step() > committed:
            committed = manager.current_step()
            diary.tell(committed, manager.num_participants() * size)


SYSTEMS = {"bagua": bagua, "torchrun": torchrun, "torchft": torchft}


def main():
    system, folder, megabytes, every = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    SYSTEMS[system](Diary(folder), folder, megabytes, every)


if __name__ == "__main__":
    main()
