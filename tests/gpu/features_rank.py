"""A rank of the section ``features``: mixed precision, CUDA graphs, expandable segments."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from gpu.common import device_of, synchronize
from gpu.training_rank import Training, layers_of, model_of, quiet

WIDTH, LAYERS, BATCH = 64, 4, 32
STEPS, BROKEN = 5, 2  # in one step one rank's gradients are infinite, where they are scaled
SCALE = 1024.0
MODES = ("float32", "bf16 autocast", "bf16 parameters", "fp16 autocast, scaled")


class Replica:
    """A model, its optimizer and scaler in one of the MODES."""

    def __init__(self, model: nn.Module, mode: str, device: torch.device) -> None:
        self.model, self.mode, self.device = model, mode, device
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaled = mode.endswith("scaled")
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=100, enabled=scaled)

    def backward(self, step: int, rank: int, share: float) -> None:
        """Adds the gradients of one rank's batch, ``share`` times."""
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(BATCH, WIDTH, generator=generator).to(self.device)
        if self.mode == "bf16 parameters":
            inputs = inputs.bfloat16()
        half = torch.float16 if self.mode.startswith("fp16") else torch.bfloat16
        with torch.autocast(self.device.type, dtype=half, enabled="autocast" in self.mode):
            loss = self.model(inputs).float().square().mean() * share
        if self.scaler.is_enabled() and step == BROKEN and rank == 1:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Updates the parameters."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        """All parameters, on the CPU."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).cpu()


def lively(model: nn.Module) -> nn.Module:
    """Weights so large that a few steps move them by per cents: what an exchange does must be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


def apart(mine: torch.Tensor, its: torch.Tensor, start: torch.Tensor) -> float:
    """How far ``mine`` is from ``its``, by the way that this went from the start."""
    return float((mine.double() - its.double()).norm() / (its.double() - start.double()).norm())


def trained(mode: str, device: torch.device) -> dict[str, Any]:
    """``apart``: how far this rank is from a plain replica that saw all ranks' batches; its parameters; its scale."""
    model = lively(model_of(WIDTH, LAYERS, device))
    if mode == "bf16 parameters":
        model = model.bfloat16()
    plain, ours = Replica(copy.deepcopy(model), mode, device), Replica(model, mode, device)
    ours.model = ours.model.with_bagua([ours.optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    ranks, start = bagua.get_world_size(), plain.weights()
    for step in range(STEPS):
        ours.backward(step, bagua.get_rank(), 1.0)
        ours.step()
        for rank in range(ranks):
            plain.backward(step, rank, 1.0 / ranks)
        plain.step()
    mine, its = ours.weights(), plain.weights()
    ours.model.bagua_ddp.close()  # type: ignore[union-attr, operator]
    return {"apart": apart(mine, its, start), "weights": mine, "scale": ours.scaler.get_scale()}


def precisions(port: int, kind: str, limit_s: float, modes: list[str]) -> dict[str, Any]:
    """Every mode; and whether torch's memory lies in expandable segments."""
    quiet()
    device = device_of(kind)
    bagua.init_process_group()
    found: dict[str, Any] = {mode: trained(mode, device) for mode in modes}
    segments = torch.cuda.memory_snapshot() if device.type == "cuda" else []
    found["expandable"] = any(segment.get("is_expandable") for segment in segments)
    return found


def graphs(port: int, kind: str, limit_s: float) -> dict[str, Any]:
    """``refusal``: what is said where a whole step is captured; ``after``: what the next step says; ``apart``: as in
    ``trained``, of a model whose passes are captured and whose step is not."""
    quiet()
    device = device_of(kind)
    bagua.init_process_group()
    model = lively(model_of(WIDTH, LAYERS, device))
    plain = Replica(copy.deepcopy(model), "float32", device)
    sample = torch.randn(BATCH, WIDTH, device=device)
    model = torch.cuda.make_graphed_callables(model, (sample,))
    ours = Replica(model, "float32", device)
    ours.model = ours.model.with_bagua([ours.optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    ranks, start = bagua.get_world_size(), plain.weights()
    for step in range(STEPS):
        ours.backward(step, bagua.get_rank(), 1.0)
        ours.step()
        for rank in range(ranks):
            plain.backward(step, rank, 1.0 / ranks)
        plain.step()
    mine, its = ours.weights(), plain.weights()
    ours.model.bagua_ddp.close()  # type: ignore[union-attr, operator]
    return {"apart": apart(mine, its, start), **_whole_step(device)}


def words(error: BaseException | None) -> str:
    """The text of an error, and of the errors in whose handling it was raised: a capture that is ended by a refusal
    may fail for that reason, and raise an error of its own."""
    found = []
    while error is not None:
        found.append(str(error))
        error = error.__cause__ or error.__context__
    return "; before that: ".join(found)


def _whole_step(device: torch.device) -> dict[str, str]:
    training = Training(layers_of(WIDTH, LAYERS, BATCH, device)).with_bagua()
    for _ in range(4):
        training.step()
    synchronize(device)
    said = {"refusal": "", "after": ""}
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            training.step()
    except Exception as error:
        said["refusal"] = words(error)
    try:
        training.step()
        synchronize(device)
    except Exception as error:
        said["after"] = str(error)
    return said
