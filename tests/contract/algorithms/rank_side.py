"""What ranks of the contract suite do: one job after the other, each with a deadline and a file for what it found."""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests

from contract.algorithms import load_cases
from contract.algorithms.case import Case, flat, seeded

import bagua.torch_api as bagua

JOB_DEADLINE_S = 60.0
"""For hangs alone: whoever waits that long shows where, and ends."""


def rank_jobs(names: list[str], folder: str) -> None:
    """Does the jobs ("case NAME" and so on) in their order. Writes what each returned, or its error, to a file; ends at
    the first error, because ranks may be out of step after it."""
    bagua.init_process_group()
    for number, name in enumerate(names):
        faulthandler.dump_traceback_later(JOB_DEADLINE_S, exit=True)
        found: dict[str, Any] = {}
        try:
            found["result"] = job(name)()
            bagua.barrier()
        except BaseException:
            found["error"] = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        path = Path(folder) / f"{number}-{bagua.get_rank()}.pt"
        torch.save(found, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        if "error" in found:
            sys.exit(found["error"])


def job(name: str) -> Callable[[], Any]:
    """What a job does."""
    kind, _, rest = name.partition(" ")
    if kind == "case":
        return lambda: train_case(load_cases()[rest])
    raise ValueError(f"Unknown job {name!r}.")


def check_identical(model: nn.Module) -> None:
    """All ranks hold the same bits."""
    for name, parameter in model.named_parameters():
        mine = parameter.detach().contiguous().view(-1).view(torch.uint8)
        everyone = torch.zeros(bagua.get_world_size(), mine.numel(), dtype=torch.uint8)
        bagua.allgather(mine, everyone)
        assert bool((everyone == everyone[0]).all()), f"{name} differs between ranks"


def one_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], loss: Any, rank: int, step: int) -> None:
    """One pass, one step of every optimizer."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss(model, rank, step).backward()
    for optimizer in optimizers:
        optimizer.step()


def wrapped(case: Case) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The case's model, other parameters on every rank before it is wrapped, and its optimizers."""
    if case.bucket_bytes is None:
        os.environ.pop("BAGUA_DEFAULT_BUCKET_SIZE", None)
    else:
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(case.bucket_bytes)
    model = seeded(case.model, seed=bagua.get_rank())
    optimizers = case.optimizers(model)
    return model.with_bagua(optimizers, case.algorithm(), **case.options), optimizers  # type: ignore[operator]


def train_case(case: Case) -> list[torch.Tensor]:
    """Parameters after each step."""
    model, optimizers = wrapped(case)
    train = case.train or one_step
    found = []
    for step in range(case.steps):
        train(model, optimizers, case.loss, bagua.get_rank(), step)
        found.append(flat(model))
        if case.must_be_equal(step):
            check_identical(model)
        case.check(model, step)
    model.bagua_ddp.close()  # type: ignore[operator, union-attr]
    return found
