"""A rank of the section ``torch_group``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from gpu.common import device_of, free_port, keep, median, synchronize
from gpu.group import join
from gpu.training_rank import quiet

TURNS, ROW = 9, 8
LARGE, SMALL = 16 << 20, 1024  # elements


def host_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of the host in a call, in a row of ``repeats`` on a device that had nothing to do."""
    taken = []
    for _ in range(TURNS):
        dist.barrier()
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        taken.append((time.perf_counter() - begun) / repeats)
        synchronize(device)
    return median(taken)


def beside(port: int, kind: str, sizes: list[int], limit_s: float) -> dict[str, float]:
    """Seconds of the host, by what they were spent on."""
    quiet()
    device = device_of(kind)
    join(port, device, limit_s)
    found: dict[str, float] = {}
    for size in sizes:
        ours, theirs = (torch.zeros(size // 4, device=device) for _ in range(2))
        works: dict[str, Callable[[], object]] = {
            "bagua": lambda ours=ours: bagua.allreduce_inplace(ours, op=bagua.ReduceOp.AVG),
            "torch": lambda theirs=theirs: dist.all_reduce(theirs, async_op=True).wait(),
        }
        for repeats in (1, ROW):
            for name, work in works.items():
                work()
                found[f"{name}, {size >> 10} KiB, {repeats} in a row"] = host_seconds(work, device, repeats)
        keep(found)
    ranks = list(range(bagua.get_world_size()))
    data = torch.ones(SMALL, device=device)
    made = []  # none ends before all are made: NCCL takes up to half a second to end one
    for turn in range(2):
        for name, make in (("torch", torch_group), ("bagua", bagua_group)):
            dist.barrier()
            synchronize(device)
            begun = time.perf_counter()
            all_reduce = make(ranks)
            made.append(all_reduce)
            found[f"{name}, another group, {turn}"] = time.perf_counter() - begun
            all_reduce(data)
            found[f"{name}, another group, until its first operation is enqueued, {turn}"] = time.perf_counter() - begun
            synchronize(device)
            found[f"{name}, another group, until its first result, {turn}"] = time.perf_counter() - begun
            keep(found)
    return found


def torch_group(ranks: list[int]) -> Callable[[torch.Tensor], None]:
    """The all-reduce of a new group."""
    group = dist.new_group(ranks)
    return lambda data: dist.all_reduce(data, group=group)


def bagua_group(ranks: list[int]) -> Callable[[torch.Tensor], None]:
    """The all-reduce of a new communicator."""
    made = bagua.communication.new_group(ranks).get_global_communicator()
    return lambda data: bagua.allreduce_inplace(data, comm=made)


def loses_one(port: int, kind: str, victim: int, limit_s: float) -> dict[str, float]:
    """Seconds since a rank that was killed in an all-reduce of torch's group is gone: until the group is aborted, and
    the survivors have the first result of another group. ``wrong``: elements of that result."""
    quiet()
    device = device_of(kind)
    join(port, device, limit_s)
    data = torch.ones(LARGE if device.type == "cuda" else SMALL, device=device)
    pids = torch.zeros(bagua.get_world_size(), dtype=torch.float64, device=device)
    ports = torch.tensor([float(free_port())], dtype=torch.float64, device=device)
    pids[bagua.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    dist.broadcast(ports, 0)
    gone, again = int(pids[victim].item()), int(ports.item())
    for _ in range(3):
        dist.all_reduce(data)
    synchronize(device)
    dist.barrier()
    if bagua.get_rank() == victim:
        dist.all_reduce(data, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(Exception):  # Gloo's raises
        dist.all_reduce(data, async_op=True)
    deadline = time.monotonic() + limit_s
    while alive(gone):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Rank {victim} should have killed itself, and lives after {limit_s:.0f} s.")
        time.sleep(0.0005)
    begun = time.perf_counter()
    found: dict[str, float] = {}
    abort_group(device)
    found["the group is aborted"] = time.perf_counter() - begun
    keep(found)
    rank = bagua.get_rank() - int(bagua.get_rank() > victim)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{again}",
        rank=rank,
        world_size=bagua.get_world_size() - 1,
        timeout=timedelta(seconds=limit_s),
    )
    found["there is another group"] = time.perf_counter() - begun
    keep(found)
    once = torch.ones_like(data)
    dist.all_reduce(once)
    synchronize(device)
    found["its first result"] = time.perf_counter() - begun
    found["wrong"] = float((once != bagua.get_world_size() - 1).sum().item())
    keep(found)
    return found


def abort_group(device: torch.device) -> None:
    """As a program has to do it: there is no public call that aborts a group in all versions of torch."""
    if device.type == "cuda":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False
