"""Gradients scaled by torch.amp.GradScaler: a step that one rank must skip is skipped by all."""

from __future__ import annotations

import torch

import bagua.torch_api as bagua
from bagua.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    Codec,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    TopKAlgorithm,
)
from training_scenarios.support import check_identical, mlp, scenario, seeded, sgd, square

STEPS = 8
OVERFLOW = 3
"""The step in which the last rank's loss is infinite."""


def algorithms() -> dict[str, Algorithm]:
    """Those after whose exchange all ranks hold the same gradients."""
    codecs = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "onebit")
    return {
        "full": GradientAllReduceAlgorithm(),
        **{codec: GradientAllReduceAlgorithm(codec=codec) for codec in codecs},
        "topk": GradientAllReduceAlgorithm(codec=Codec("topk", density=0.2, error_feedback=True)),
        "bytegrad": ByteGradAlgorithm(),
        "top_k": TopKAlgorithm(0.2),
        "power_sgd": PowerSGDAlgorithm(2),
    }


def train(name: str, algorithm: Algorithm) -> None:
    """Trains with a scaler as its documentation says, without a word to bagua."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = seeded(mlp, seed=rank)
    optimizer = sgd(model)
    model.with_bagua([optimizer], algorithm)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    for step in range(STEPS):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        loss = square(model, rank, step)
        if step == OVERFLOW and rank == n - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        where = f"{name}, step {step}, rank {rank}"
        assert moved == (step != OVERFLOW), f"{where}: the step was {'taken' if moved else 'skipped'}"
        assert scaler.get_scale() == (256.0 if step < OVERFLOW else 128.0), f"{where}: scale {scaler.get_scale()}"
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters()), where
        check_identical(model)
    model.bagua_ddp.close()


@scenario
def overflow_on_one_rank() -> None:
    for name, algorithm in algorithms().items():
        train(name, algorithm)
