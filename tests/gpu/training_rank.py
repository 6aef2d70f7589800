"""A rank of the sections ``step``, ``waits`` and ``faults``: a model that trains on the card."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.join.session import current
from gpu.common import device_of, keep
from gpu.group import agreed, cost_of, in_turns, join, predicted, slowest

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
)
STARTED, STEPS = "STARTED", "the steps"


def model_of(width: int, layers: int, device: torch.device) -> nn.Module:
    """Linear layers with activations between them; the same everywhere."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, device=device), nn.GELU()]
    return nn.Sequential(*parts)


class Training:
    """A model, its optimizer, and a batch of the rank's own that lies on the card."""

    def __init__(self, width: int, layers: int, batch: int, device: torch.device) -> None:
        self.model = model_of(width, layers, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        torch.manual_seed(1 + bagua.get_rank())  # of the same batches a mean would be what it was before
        self.inputs = torch.randn(batch, width, device=device)

    def with_bagua(self) -> Training:
        """Wrapped by Bagua."""
        self.model = self.model.with_bagua([self.optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
        return self

    def with_ddp(self, device: torch.device) -> Training:
        """Wrapped by DDP."""
        places = [device] if device.type == "cuda" else None
        self.model = DistributedDataParallel(self.model, device_ids=places, gradient_as_bucket_view=True)
        return self

    def step(self) -> None:
        """One step, without a wait of its own."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()


def quiet() -> None:
    """The rig makes errors of warnings; here torch's warnings are no matter."""
    warnings.simplefilter("ignore")


def step_times(port: int, kind: str, models: list[tuple[int, int, int]], limit_s: float) -> list[dict[str, Any]]:
    """Of each model (width, layers, batch) for which there is time what ``step_times_of`` returns."""
    quiet()
    until = time.monotonic() + 0.7 * limit_s
    device = device_of(kind)
    join(port, device, limit_s)
    found: list[dict[str, Any]] = []
    known: dict[str, dict[int, float]] = {}
    for width, layers, batch in models:
        work = layers * batch * width**2
        cost = cost_of(predicted(seconds, work) for seconds in known.values())
        if not agreed(float(time.monotonic() + cost < until), device):
            break
        found.append(step_times_of(width, layers, batch, device))
        for name, seconds in found[-1]["seconds"].items():
            known.setdefault(name, {})[work] = seconds
        keep(found)
    return found


def step_times_of(width: int, layers: int, batch: int, device: torch.device) -> dict[str, Any]:
    """Seconds of a step with Bagua, with DDP, and alone; and how far the gradients of both replicas are apart."""
    ours = Training(width, layers, batch, device).with_bagua()
    ddp = Training(width, layers, batch, device).with_ddp(device)
    alone = Training(width, layers, batch, device)
    for one in (ours, ddp):
        one.step()
    apart = gradients_apart(ours.model, ddp.model)
    found = in_turns({"bagua": ours.step, "ddp": ddp.step, "alone": alone.step}, device)
    nbytes = sum(p.numel() * p.element_size() for p in alone.model.parameters())
    ours.model.bagua_ddp.close()  # type: ignore[union-attr, operator]
    return {"seconds": {name: slowest(value, device) for name, value in found.items()}, "apart": apart, "bytes": nbytes}


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
    training = Training(width, layers, batch, device).with_bagua()
    for _ in range(20):
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
        calls = runtime_calls(json.loads(Path(folder, "trace.json").read_text())["traceEvents"])
    waits = {name: calls.count(name) for name in WAITS if name in calls}
    return {"waits": waits, "runtime_calls": len(calls), "leg": leg_waits() - before, "agreed": agreed(1.0, device)}


def runtime_calls(trace: list[dict[str, Any]]) -> list[str]:
    """Calls of CUDA in the steps, by the threads that carry out operations of torch: those of the leg may wait, and the
    profiler does, at its end."""
    workers = {event["tid"] for event in trace if event.get("cat") == "cpu_op"}
    [steps] = [event for event in trace if event.get("name") == STEPS and event.get("cat") == "user_annotation"]
    calls = [event for event in trace if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    inside = [call for call in calls if steps["ts"] <= call["ts"] <= steps["ts"] + steps["dur"]]
    return [call["name"] for call in inside if call["tid"] in workers]


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
