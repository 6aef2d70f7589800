"""Section: the time of a training step beside DDP with NCCL, in turns in the same processes; two ranks, one card."""

import functools
import math
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.session import current
from gpu.common import device_of, keep, median, repeats_for, seconds_per_turn
from gpu.engine_run import run_ranks
from gpu.findings import section
from gpu.training_rank import Training, quiet, workload_of

ROUNDS, FEW_ROUNDS = 7, 3
TURN_S = 0.04
# (width, layers, batch): 4 MiB in many small tensors, 64 MiB, 512 MiB of parameters; the others: bagua bench train's
MODELS = ((256, 16, 256), "resnet", "transformer", "mlp", (1024, 16, 512), (2896, 16, 512))
REHEARSED = ((32, 4, 8), "tiny")
ROUTES = ("", "flat", "staged")  # empty: as the leg chooses
HOSTS = ((0,), (1,))
APART = 1e-3
TIE = 1.02
MADE = 2  # the leg counts what it has to make, too: memory that is not given back in time, once in a while


def work(findings, given):
    begun = time.monotonic()
    models = MODELS if given.device == "cuda" else REHEARSED
    for index, route in enumerate(ROUTES):
        share = (given.seconds - (time.monotonic() - begun)) / (len(ROUTES) - index)
        name = route or "chosen"
        with findings.guarded(name):
            take = functools.partial(tell, findings, name)
            limit_s = max(10.0, share)
            found = run_ranks(step_times, HOSTS, given.device, route, limit_s, partly=take, models=models)
            take(found)
            if len(found[0]) < len(models):
                findings.note(f"{name}: time did not suffice for the largest models.")


def tell(findings, route, found):
    for index, one in enumerate(found[0]):
        tell_one(findings, route, one, max(rank[index]["apart"] for rank in found if index < len(rank)))


def tell_one(findings, route, one, apart):
    name = f"{one['model']}, {one['bytes'] / 2**20:.0f} MiB"
    findings.check(f"{route}, {name}: the same gradients as DDP's", apart <= APART, f"apart {apart:.3g}")
    findings.check(f"{route}, {name}: the leg makes nothing new in a step", one["waits"] <= MADE, str(one["waits"]))
    ratio = one["seconds"]["bagua"] / one["seconds"]["ddp"]
    findings.row(
        "step, 2 ranks",
        route=route,
        model=name,
        **{f"{which} ms": seconds * 1e3 for which, seconds in one["seconds"].items()},
        **{"times DDP's": ratio, "target": "met" if ratio <= TIE else "missed"},
    )


def join(port, device, limit_s):
    """Bagua's group of all ranks, and NCCL's (Gloo's on the CPU) beside it."""
    os.environ["BAGUA_TORCH_DISTRIBUTED"] = "0"  # the peer's group is torch's, not Bagua's in its place
    bagua.init_process_group()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=bagua.get_rank(),
        world_size=bagua.get_world_size(),
        timeout=timedelta(seconds=limit_s),
    )


def agreed(value, device):
    said = torch.tensor([value], dtype=torch.float32, device=device)
    dist.broadcast(said, 0)
    return float(said.item())


def in_turns(works, device):
    """Median seconds of each, measured in turns, as many times on all ranks."""
    repeats = {}
    for name, work in works.items():
        work()
        once = agreed(seconds_per_turn(work, 1, device), device)
        if once < TURN_S:  # what takes longer is warm, and measured well enough
            once = agreed(seconds_per_turn(work, 4, device), device)
        repeats[name] = repeats_for(once, TURN_S)
    taken = {name: [] for name in works}
    for _ in range(ROUNDS if min(repeats.values()) > 1 else FEW_ROUNDS):  # few where one turn alone takes long
        for name, work in works.items():
            dist.barrier()
            taken[name].append(seconds_per_turn(work, repeats[name], device))
    return {name: median(values) for name, values in taken.items()}


def slowest(seconds, device):
    value = torch.tensor([seconds], dtype=torch.float32, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def step_times(port, kind, models, limit_s):
    """Of each model (see ``workload_of``) for which there is time what ``step_times_of`` returns."""
    quiet()
    until = time.monotonic() + 0.8 * limit_s
    device = device_of(kind)
    join(port, device, limit_s)
    found = []
    longest = 0.0
    for which in models:
        begun = time.monotonic()
        if not agreed(float(begun + longest < until), device):
            break
        found.append({"model": str(which), **step_times_of(workload_of, which, device)})
        longest = max(longest, time.monotonic() - begun)
        keep(found)
    return found


def step_times_of(make, which, device):
    """``seconds`` of a step with Bagua, with DDP, and alone; how far both replicas' gradients are apart; waits for the
    card in a warm step; bytes of parameters."""
    ours = Training(make(which, device)).with_bagua()
    ddp = Training(make(which, device)).with_ddp(device)
    alone = Training(make(which, device))
    for one in (ours, ddp):
        one.step()
    apart = gradients_apart(ours.model, ddp.model)
    seconds = in_turns({"bagua": ours.step, "ddp": ddp.step, "alone": alone.step}, device)
    found = {
        "seconds": {name: slowest(value, device) for name, value in seconds.items()},
        "apart": apart,
        "waits": waits_of(ours, device),
        "bytes": sum(p.numel() * p.element_size() for p in alone.model.parameters()),
    }
    ours.model.bagua_ddp.close()
    return found


def gradients_apart(mine, theirs):
    """How far the gradients of one are from the other's, by those: one step moves the parameters too little to tell."""
    off = whole = 0.0
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        off += float((one.grad.double() - other.grad.double()).square().sum())
        whole += float(other.grad.double().square().sum())
    return math.sqrt(off / whole)


def waits_of(training, device):
    """Waits that the GPU leg counts in a step. Raises where torch itself waits for the card."""
    before = leg_waits()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        training.step()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return leg_waits() - before


def leg_waits():
    """Waits of the caller that the GPU leg has counted so far; 0 without one."""
    return sum(lane.counters()["host_waits"] for lane in devices(current()).all())


if __name__ == "__main__":
    sys.exit(section("step", work, __doc__))
