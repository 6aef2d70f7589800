"""A rank of the sections ``step``, ``waits`` and ``faults``: a model that trains on the card."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
)
STARTED, STEPS = "STARTED", "the steps"
HOST_ROUNDS = 9


def model_of(width: int, layers: int, device: torch.device) -> nn.Module:
    """Linear layers with activations between them; the same everywhere."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, device=device), nn.GELU()]
    return nn.Sequential(*parts)


def layers_of(width: int, layers: int, batch: int, device: torch.device, batches_of: int | None = None) -> Workload:
    """``model_of``, with a batch of the rank's own, or ``batches_of`` another one: of the same batches a mean would be
    what it was before."""
    model = model_of(width, layers, device)
    torch.manual_seed(1 + (bagua.get_rank() if batches_of is None else batches_of))
    inputs = torch.randn(batch, width, device=device)
    return Workload(model, lambda model: model(inputs).square().mean())


def workload_of(which: str | Sequence[int], device: torch.device) -> Workload:
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

    def __init__(self, workload: Workload) -> None:
        self.model, self.loss_of = workload.model, workload.loss_of
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def with_bagua(self) -> Training:
        """Wrapped by Bagua."""
        self.model = self.model.with_bagua([self.optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
        return self

    def with_ddp(self, device: torch.device) -> Training:
        """Wrapped by DDP."""
        places = [device] if device.type == "cuda" else None
        self.model = DistributedDataParallel(self.model, device_ids=places, gradient_as_bucket_view=True)
        return self

    def step(self, set_to_none: bool = False) -> None:
        """One step, without a wait of its own."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.loss_of(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def quiet() -> None:
    """The rig makes errors of warnings; here torch's warnings are no matter."""
    warnings.simplefilter("ignore")


def step_times(port: int, kind: str, models: list[Any], limit_s: float) -> list[dict[str, Any]]:
    """Of each model (see ``workload_of``) for which there is time what ``step_times_of`` returns."""
    quiet()
    until = time.monotonic() + 0.8 * limit_s
    device = device_of(kind)
    join(port, device, limit_s)
    found: list[dict[str, Any]] = []
    longest = 0.0
    for which in models:
        begun = time.monotonic()
        if not agreed(float(begun + longest < until), device):
            break
        found.append({"model": str(which), **step_times_of(workload_of, which, device)})
        longest = max(longest, time.monotonic() - begun)
        keep(found)
    return found


def step_times_of(make: Callable[..., Workload], which: Any, device: torch.device) -> dict[str, Any]:
    """``seconds`` of a step with Bagua, with DDP, and alone; ``host_s``: those that the host spends in Bagua's calls in
    a step; ``host_step_s``: in a whole step, by each of the three, with new gradients as torch makes them by default;
    how far the gradients of both replicas are apart; buckets; bytes of parameters."""
    with HostTime() as host:
        ours = Training(make(which, device)).with_bagua()
        ddp = Training(make(which, device)).with_ddp(device)
        alone = Training(make(which, device))
        for one in (ours, ddp):
            one.step()
        apart = gradients_apart(ours.model, ddp.model)
        works = {"bagua": ours.step, "ddp": ddp.step, "alone": alone.step}
        found = in_turns(works, device)
        turns = [host.of(ours.step, device) for _ in range(HOST_ROUNDS)]
    whole: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(HOST_ROUNDS):
        for name, one in (("bagua", ours), ("ddp", ddp), ("alone", alone)):
            whole[name].append(host_seconds(functools.partial(one.step, set_to_none=True), device))
    nbytes = sum(p.numel() * p.element_size() for p in alone.model.parameters())
    buckets = len(ours.model.bagua_buckets)  # type: ignore[arg-type]
    ours.model.bagua_ddp.close()  # type: ignore[union-attr, operator]
    return {
        "seconds": {name: slowest(value, device) for name, value in found.items()},
        "host_s": {name: slowest(median([one[name] for one in turns]), device) for name in turns[0]},
        "host_step_s": {name: slowest(median(taken), device) for name, taken in whole.items()},
        "apart": apart,
        "bytes": nbytes,
        "buckets": buckets,
    }


class HostTime:
    """Seconds of the host in calls, by label: of the reducer, for each gradient and at the end of backward, and in them
    of buckets (which start with their copies, and show results) and of the connection. The time of a whole step says
    nothing where ranks share a card, on which they take turns."""

    CALLS: tuple[tuple[type, str, str], ...] = (
        (TrainingStep, "mark_ready", "all"),
        (TrainingStep, "finish", "all"),
        (GradientBucket, "start", "start"),
        (GradientBucket, "show_results", "results"),
        (CudaConnection, "submit", "submit"),
        (CudaConnection, "wait", "wait"),
    )

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._before = [getattr(owner, name) for owner, name, _ in self.CALLS]

    def __enter__(self) -> HostTime:
        for (owner, name, label), call in zip(self.CALLS, self._before, strict=True):
            setattr(owner, name, self._counted(call, label))
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name, _), call in zip(self.CALLS, self._before, strict=True):  # type: ignore[assignment]
            setattr(owner, name, call)

    def _counted(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._seconds[label] = self._seconds.get(label, 0.0) + time.perf_counter() - begun

        return counted

    def of(self, work: Callable[[], None], device: torch.device) -> dict[str, float]:
        """Of one ``work`` on a device that had nothing to do."""
        synchronize(device)
        self._seconds = {}
        work()
        found = self._seconds
        synchronize(device)
        return found


def host_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Of the host in ``work`` on a device that had nothing to do: it enqueues, and waits for nothing."""
    dist.barrier()
    synchronize(device)
    begun = time.perf_counter()
    work()
    taken = time.perf_counter() - begun
    synchronize(device)
    return taken


def gradients_apart(mine: nn.Module, theirs: nn.Module) -> float:
    """How far the gradients of one are from the other's, by those: one step moves the parameters too little to tell."""
    off = whole = 0.0
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        off += float((one.grad.double() - other.grad.double()).square().sum())
        whole += float(other.grad.double().square().sum())
    return math.sqrt(off / whole)


def profiled(port: int, kind: str, width: int, layers: int, batch: int, limit_s: float, steps: int) -> dict[str, Any]:
    """Waits for the card in ``steps`` steps: calls by name, from a profile; what torch itself sees; what the leg
    counted."""
    quiet()
    device = device_of(kind)
    join(port, device, limit_s)
    training = Training(layers_of(width, layers, batch, device)).with_bagua()
    for _ in range(60):  # the host runs ahead of the card, as far as it ever will
        training.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.set_sync_debug_mode("error")
    before = leg_waits()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(STEPS):
            for _ in range(steps):
                training.step()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            end = torch.cuda.Event()
            end.record()
            while not end.query():
                time.sleep(0.001)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    calls = runtime_calls(trace)
    waits = {name: calls.count(name) for name in WAITS if name in calls}
    return {
        "waits": waits,
        "runtime_calls": len(calls),
        "leg": leg_waits() - before,
        "submit": calls_in_submit(trace),
        "agreed": agreed(1.0, device),
    }


def runtime_calls(trace: list[dict[str, Any]]) -> list[str]:
    """Calls of CUDA in the steps, by the threads that carry out operations of torch: those of the leg may wait, and the
    profiler does, at its end."""
    workers = {event["tid"] for event in trace if event.get("cat") == "cpu_op"}
    [steps] = [event for event in trace if event.get("name") == STEPS and event.get("cat") == "user_annotation"]
    calls = [event for event in trace if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    inside = [call for call in calls if steps["ts"] <= call["ts"] <= steps["ts"] + steps["dur"]]
    return [call["name"] for call in inside if call["tid"] in workers]


def calls_in_submit(trace: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Calls of CUDA by the thread that hands a bucket over, while it does: how many for a bucket, and their
    microseconds together. "" are those of all that it does there."""
    spans = [event for event in trace if str(event.get("name")).startswith("bagua:submit") and "dur" in event]
    spans = [span for span in spans if span.get("cat") == "user_annotation"]
    calls = [event for event in trace if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    found = {"": [span["dur"] for span in spans]}
    for span in spans:
        end = span["ts"] + span["dur"]
        for call in calls:
            if call["tid"] == span["tid"] and span["ts"] <= call["ts"] <= end:
                found.setdefault(call["name"], []).append(call["dur"])
    return {name: (len(us) / max(1, len(spans)), sum(us) / max(1, len(spans))) for name, us in found.items()}


def leg_waits() -> int:
    """Waits of the caller that the GPU leg has counted so far; 0 without one."""
    return sum(lane.counters()["host_waits"] for lane in devices(current()).all())


def until_killed(kind: str, count: int, victim: int, after: int) -> dict[str, Any]:
    """All-reduces without end; the victim kills itself after some, in the middle of the next. The others return their
    error, and how long after the kill it came (by the clock that all processes share)."""
    quiet()
    device = device_of(kind)
    bagua.init_process_group()
    data = torch.ones(count, device=device)
    work: Callable[[], None] = lambda: bagua.allreduce_inplace(data, op=bagua.ReduceOp.AVG)  # noqa: E731
    for _ in range(after):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(STARTED, flush=True)
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
