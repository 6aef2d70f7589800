"""Runs a program under Gloo and under backend "bagua" on the same ranks, and compares what it returns."""

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

Result = Mapping[str, object]
Program = Callable[[Path], Result]
"""Runs with its process group up; gets a folder that all ranks share; returns numbers, tensors and lists of them, by
name."""

LIMIT = timedelta(seconds=300)
CLOSE = 1e-9


def compare(name, program, folder, rank, size):
    """Raises AssertionError where the two don't agree."""
    results = {}
    for backend in ("gloo", "bagua"):
        own = folder / f"{name}-{backend}".replace(" ", "-")
        own.mkdir(exist_ok=True)
        dist.init_process_group(backend, init_method=f"file://{own}/meet", rank=rank, world_size=size, timeout=LIMIT)
        sys.excepthook = sys.__excepthook__  # torch's says the rank once more each time
        torch.manual_seed(11)
        try:
            results[backend] = program(own)
            dist.barrier()
        finally:
            destroy_groups()
    assert results["gloo"], "a program must return something"
    assert_close(name, results["bagua"], results["gloo"])


def destroy_groups():
    """Before version 2.8 torch frees a group while it holds the interpreter's lock. Gloo then joins threads that may
    wait for this lock, because they have a tensor to free. A backend that Python holds is freed without the lock."""
    groups = dist.distributed_c10d._world.pg_map
    kept = [group._get_backend(torch.device("cpu")) for group in groups if dist.get_backend(group) == "gloo"]
    dist.destroy_process_group()
    kept.clear()


def assert_close(where, ours, theirs):
    """Tensors of float64 to 1e-9; anything else is the same."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor), where
        if theirs.dtype == torch.float64:
            torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=CLOSE, msg=lambda text: f"{where}: {text}")
        else:
            assert torch.equal(ours, theirs), f"{where}: {ours} instead of {theirs}"
    elif isinstance(theirs, Mapping):
        assert isinstance(ours, Mapping) and ours.keys() == theirs.keys(), f"{where}: {ours} instead of {theirs}"
        for key in theirs:
            assert_close(f"{where} {key}", ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert isinstance(ours, list | tuple) and len(ours) == len(theirs), where
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_close(f"{where} {number}", *pair)
    elif isinstance(theirs, float):
        assert isinstance(ours, float) and abs(ours - theirs) <= CLOSE * max(1.0, abs(theirs)), (
            f"{where}: {ours} {theirs}"
        )
    else:
        assert ours == theirs, f"{where}: {ours} instead of {theirs}"


# Small models and data, in float64


def network(width=24, dtype=torch.float64):
    """[*, 8] -> [*, 4]."""
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)).to(
        dtype
    )


def batch(step, size=6, dtype=torch.float64):
    """This rank's inputs [size, 8] and targets [size, 4] of a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(size, 8, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), inputs[:, :4].sin().to(dtype)


def train(model, steps=4, optimizer=None, forward=None):
    """The losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = forward(model, step) if forward is not None else mean_square(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_square(model, step):
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs), targets)


def parameters(model):
    """Copies, whole where they are sharded."""
    return [getattr(one, "full_tensor", one.detach)().detach().clone() for one in model.parameters()]
