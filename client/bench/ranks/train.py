"""Training steps: Bagua's algorithms, DDP over Gloo with its hooks, and no communication, in the same processes.

Every system trains a replica of its own; parameters of all replicas share memory (their values do not matter here), so
that a large model fits many times. Systems take turns of some steps each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.base import algorithm_choice
from bagua.bench.ranks import harness
from bagua.bench.ranks.hooks import bf16_hook
from bagua.bench.ranks.models import WORKLOADS, Workload

ALONE = "no communication"
TURN_S = 0.4  # a turn has as many steps as fit, at least one
MOST_STEPS = 100
# The least of a turn for what communicates in the background: one exchange is under way while many steps go by.
BACKGROUND_STEPS = 10
LEARNING_RATE = 1e-5
ONE_BUCKET_MB = 1 << 14
# Thresholds of malloc that daemons raise for their ranks.
MALLOC_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def without_communication(model: nn.Module, _: torch.optim.Optimizer) -> nn.Module:
    return model


def with_bagua(text: str) -> Callable[[nn.Module, torch.optim.Optimizer], nn.Module]:
    """Bagua, with the algorithm that ``text`` names."""
    name, arguments = algorithm_choice.parse(text)

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        wrapped: nn.Module = model.with_bagua([optimizer], Algorithm.init(name, **arguments))  # type: ignore[operator]
        return wrapped

    return prepare


def fewest_steps(text: str) -> int:
    """The least that a turn of the algorithm has: a whole period of one that sends now and then."""
    name, arguments = algorithm_choice.parse(text)
    if name == "async":
        return BACKGROUND_STEPS
    return getattr(Algorithm.init(name, **arguments), "interval", 1)


def with_ddp(hook: str) -> Callable[[nn.Module, torch.optim.Optimizer], nn.Module]:
    """DDP at its defaults, or with one of its communication hooks."""

    def prepare(model: nn.Module, _: torch.optim.Optimizer) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if hook.startswith("powersgd"):
            # Its hook deadlocks over Gloo when several buckets are in flight.
            wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
            rank = int(hook.removeprefix("powersgd"))
            # 2 is the smallest that torch takes.
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return wrapped
        wrapped = DistributedDataParallel(model)
        if hook != "ddp":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook if hook == "fp16" else bf16_hook)
        return wrapped

    return prepare


def prepare_for(system: dict[str, str]) -> Callable[[nn.Module, torch.optim.Optimizer], nn.Module]:
    """Returns the function with which a system of the configuration prepares a model."""
    if system["kind"] == "bagua":
        return with_bagua(system["algorithm"])
    return with_ddp(system["hook"]) if system["kind"] == "ddp" else without_communication


def sent_bytes(device: str) -> int:
    """Bytes that left through a network device of this namespace, headers included; 0 if there is no such device."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == device:
            return int(figures.split()[8])  # eight columns of what was received come before it
    return 0


class Trainer:
    """System at work on its replica. Sums up what its steps cost besides time."""

    def __init__(self, system: dict[str, str], workload: Workload, device: str) -> None:
        self.ours = system["kind"] == "bagua"
        self.fewest = fewest_steps(system["algorithm"]) if self.ours else 1
        self.workload = workload
        self.device = device
        # No momentum: it would be one more copy of the model for every system.
        self.optimizer = torch.optim.SGD(workload.model.parameters(), lr=LEARNING_RATE)
        self.model = prepare_for(system)(workload.model, self.optimizer)
        self.steps = 1
        self.reset_sums()

    def reset_sums(self) -> None:
        self.counted = self.wire_bytes = 0
        self.comm_s = self.exposed_s = 0.0

    def _train(self) -> None:
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            self.workload.loss_of(self.model).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def turn(self) -> float:
        """Seconds per step of the slowest rank."""
        bagua.barrier()  # waiting for late ranks is no part of the time
        before, sent = bagua.communication.statistics(), self._sent()
        found = harness.slowest(harness.seconds(self._train) / self.steps)
        after = bagua.communication.statistics()
        if self.ours:
            self._settle()
        self.counted += self.steps
        self.wire_bytes += self._sent() - sent
        self.comm_s += after.comm_seconds - before.comm_seconds
        self.exposed_s += after.exposed_seconds - before.exposed_seconds
        self.optimizer.zero_grad()  # memory of gradients is for the next system
        return found

    def _settle(self) -> None:
        """Waits for what goes on in the background: it is not for the next system's time. An asynchronous exchange that
        one rank has begun and another has not moves nothing, and stays for the next turn."""
        begun = getattr(self.model.bagua_algorithm, "begun", 0)
        # The greatest and the least: all ranks have begun as many.
        if harness.slowest(begun) == -harness.slowest(-begun):
            self.model.bagua_ddp.join()  # type: ignore[operator, union-attr]
        bagua.barrier()

    def _sent(self) -> int:
        """Bytes that left so far: as the device counts them where there is one, else as the engine does."""
        return sent_bytes(self.device) if self.device else bagua.communication.statistics().bytes_sent

    def warm_up(self, steps: int) -> None:
        """Lets buckets settle, then finds how many steps make a turn."""
        for _ in range(max(0, steps - 1)):
            self.turn()
        self.steps = max(self.fewest, min(MOST_STEPS, int(TURN_S / self.turn())))
        self.reset_sums()

    def close(self) -> None:
        """Ends the exchange, on all ranks."""
        if self.ours:
            self.model.bagua_ddp.close()  # type: ignore[operator, union-attr]

    def outcome(self, seconds: float) -> dict[str, Any]:
        """The figures of this system; None for those that are not known."""
        known = self.ours or bool(self.device)
        return {
            "s": seconds,
            "exposed_s": self.exposed_s / self.counted if self.ours else None,
            "hidden_s": (self.comm_s - self.exposed_s) / self.counted if self.ours else None,
            "sent_bytes": self.wire_bytes / self.counted if known else None,
        }


def measure_model(config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Seconds per step of every system on one model: the median, and each turn."""
    trainers: dict[str, Trainer] = {}
    shared: list[torch.Tensor] = []
    for system in config["systems"]:
        torch.manual_seed(bagua.get_rank())  # batches differ between ranks, as in training
        workload = WORKLOADS[name]()
        if not shared:
            shared = [parameter.data for parameter in workload.model.parameters()]
        for parameter, memory in zip(workload.model.parameters(), shared, strict=True):
            parameter.data = memory
        trainers[system["name"]] = Trainer(system, workload, config["device"])
    for step, (system_name, trainer) in enumerate(trainers.items()):
        harness.progress(step, len(trainers) + 1, f"{name}: {system_name} warms up")
        trainer.warm_up(config["warm_up"])
    harness.progress(len(trainers), len(trainers) + 1, f"{name}: turns")
    variants = {system_name: trainer.turn for system_name, trainer in trainers.items()}
    turns = harness.interleave(variants, config["seconds"], config["rounds"], warm=True)
    seconds = harness.medians(turns)
    parameters = sum(memory.numel() for memory in shared)
    rows = [
        {"system": system["name"], "kind": system["kind"], "parameters": parameters, "turns_s": turns[system["name"]]}
        | trainers[system["name"]].outcome(seconds[system["name"]])
        for system in config["systems"]
    ]
    for trainer in trainers.values():
        trainer.close()
    return rows


def measure(config: dict[str, Any]) -> dict[str, Any] | None:
    harness.start_gloo()
    rows = measure_model(config, config["model"])
    harness.progress(1, 1, "done")
    harness.stop_gloo()
    return {"rows": rows}


if __name__ == "__main__":
    harness.run(measure, unset={"malloc": ("default", MALLOC_SETTINGS)})
