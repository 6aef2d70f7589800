"""A rank of the sections ``step`` and ``faults``: a model that trains on the card."""

import functools
import math
import os
import signal
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.bench.ranks.models import WORKLOADS, Workload
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.session import current
from bagua.torch_api.step.gradients import GradientBucket
from bagua.torch_api.step.training_step import TrainingStep
from gpu.common import device_of, keep, median, synchronize
from gpu.group import agreed, in_turns, join, slowest

HOST_ROUNDS = 9


def model_of(width, layers, device):
    """Linear layers with activations between them; the same everywhere."""
    torch.manual_seed(0)
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, device=device), nn.GELU()]
    return nn.Sequential(*parts)


def layers_of(width, layers, batch, device, batches_of=None):
    """``model_of``, with a batch of the rank's own, or ``batches_of`` another one: of the same batches a mean would be
    what it was before."""
    model = model_of(width, layers, device)
    torch.manual_seed(1 + (bagua.get_rank() if batches_of is None else batches_of))
    inputs = torch.randn(batch, width, device=device)
    return Workload(model, lambda model: model(inputs).square().mean())


def workload_of(which, device):
    """``which``: a model of ``bagua bench train``, or (width, layers, batch). Its parameters may be other ones in each
    rank: wrapping gives all of them rank 0's."""
    if not isinstance(which, str):
        width, layers, batch = which
        return layers_of(width, layers, batch, device)
    torch.manual_seed(1 + bagua.get_rank())
    with torch.device(device):
        return WORKLOADS[which]()


class Training:
    """A model, its optimizer, and a batch of the rank's own that lies on the card."""

    def __init__(self, workload):
        self.model, self.loss_of = workload.model, workload.loss_of
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def with_bagua(self):
        self.model = self.model.with_bagua([self.optimizer], GradientAllReduceAlgorithm())
        return self

    def with_ddp(self, device):
        places = [device] if device.type == "cuda" else None
        self.model = DistributedDataParallel(self.model, device_ids=places, gradient_as_bucket_view=True)
        return self

    def step(self, set_to_none=False):
        """One step, without a wait of its own."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.loss_of(self.model).backward()
        self.optimizer.step()


def quiet():
    """The rig makes errors of warnings; here torch's warnings are no matter."""
    warnings.simplefilter("ignore")


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
    """``seconds`` of a step with Bagua, with DDP, and alone; ``host_s``: those that the host spends in Bagua's calls in
    a step; ``host_step_s``: in a whole step, by each of the three, with new gradients as torch makes them by default;
    how far the gradients of both replicas are apart; waits for the card in a warm step; buckets; bytes of
    parameters."""
    with HostTime() as host:
        ours = Training(make(which, device)).with_bagua()
        ddp = Training(make(which, device)).with_ddp(device)
        alone = Training(make(which, device))
        for one in (ours, ddp):
            one.step()
        apart = gradients_apart(ours.model, ddp.model)
        works = {"bagua": ours.step, "ddp": ddp.step, "alone": alone.step}
        found = in_turns(works, device)
        waits = waits_of(ours, device)
        turns = [host.of(ours.step, device) for _ in range(HOST_ROUNDS)]
    whole = {name: [] for name in works}
    for _ in range(HOST_ROUNDS):
        for name, one in (("bagua", ours), ("ddp", ddp), ("alone", alone)):
            whole[name].append(host_seconds(functools.partial(one.step, set_to_none=True), device))
    nbytes = sum(p.numel() * p.element_size() for p in alone.model.parameters())
    buckets = len(ours.model.bagua_buckets)
    ours.model.bagua_ddp.close()
    return {
        "seconds": {name: slowest(value, device) for name, value in found.items()},
        "host_s": {name: slowest(median([one[name] for one in turns]), device) for name in turns[0]},
        "host_step_s": {name: slowest(median(taken), device) for name, taken in whole.items()},
        "apart": apart,
        "waits": waits,
        "bytes": nbytes,
        "buckets": buckets,
    }


class HostTime:
    """Seconds of the host in calls, by label: of the reducer, for each gradient and at the end of backward, and in them
    of buckets (which start with their copies, and show results) and of the connection. The time of a whole step says
    nothing where ranks share a card, on which they take turns."""

    CALLS = (
        (TrainingStep, "mark_ready", "all"),
        (TrainingStep, "finish", "all"),
        (GradientBucket, "start", "start"),
        (GradientBucket, "show_results", "results"),
        (CudaConnection, "submit", "submit"),
        (CudaConnection, "wait", "wait"),
    )

    def __init__(self):
        self._seconds = {}
        self._before = [getattr(owner, name) for owner, name, _ in self.CALLS]

    def __enter__(self):
        for (owner, name, label), call in zip(self.CALLS, self._before, strict=True):
            setattr(owner, name, self._counted(call, label))
        return self

    def __exit__(self, *_):
        for (owner, name, _), call in zip(self.CALLS, self._before, strict=True):
            setattr(owner, name, call)

    def _counted(self, call, label):
        def counted(*arguments):
            begun = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._seconds[label] = self._seconds.get(label, 0.0) + time.perf_counter() - begun

        return counted

    def of(self, work, device):
        """Of one ``work`` on a device that had nothing to do."""
        synchronize(device)
        self._seconds = {}
        work()
        found = self._seconds
        synchronize(device)
        return found


def host_seconds(work, device):
    """Of the host in ``work`` on a device that had nothing to do: it enqueues, and waits for nothing."""
    dist.barrier()
    synchronize(device)
    begun = time.perf_counter()
    work()
    taken = time.perf_counter() - begun
    synchronize(device)
    return taken


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


def until_killed(kind, count, victim, after):
    """All-reduces without end; the victim kills itself after some, in the middle of the next. The others return their
    error, and how long after the kill it came (by the clock that all processes share)."""
    quiet()
    device = device_of(kind)
    bagua.init_process_group()
    data = torch.ones(count, device=device)
    work = lambda: bagua.allreduce_inplace(data, op=bagua.ReduceOp.AVG)  # noqa: E731
    for _ in range(after):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if bagua.get_rank() == victim:
        if device.type == "cuda":
            work()  # returns while the card is at it
        print(f"KILLED {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        return {"error": str(error), "when": time.monotonic()}
