"""Kind 4: rank 1 ends in the middle of training. It has the same exit code as under torch's DistributedDataParallel on
Gloo, and rank 0, which waits for it, is told at once: which rank ended, and how."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from habits.case import mlp
from rig.ranks.engine_hosts import make_ranks
from torch.nn.parallel import DistributedDataParallel

import bagua.c10d  # before torch 2.5 nothing else would register it
import bagua.torch_api as bagua

LAST = 2
"""The step in which rank 1 ends."""


def fail_with_notes(_):
    error = ValueError("the last batch is empty")
    error.add_note("file 7 of 9")
    raise error


def fail_in_a_group(_):
    raise ExceptionGroup("two loaders failed", [ValueError("the first one"), OSError("the second one")])


def fail_by_interrupt(_):
    raise KeyboardInterrupt


def fail_in_a_hook(net):
    """In the middle of a backward pass."""

    def hook(_):
        raise ValueError("a hook's bug")

    net[2].weight.register_hook(hook)


@dataclass(frozen=True)
class End:
    """``do``: called by rank 1, with its net. ``words``: rank 0 reads them, where the job is ours."""

    do: Callable[[Any], Any]
    words: tuple[str, ...] = ()


ENDS = {
    "exits with 3": End(lambda _: sys.exit(3), ("exit(3)",)),
    "exits with words": End(lambda _: sys.exit("no data left"), ("no data left",)),
    "raises": End(fail_with_notes, ("ValueError", "the last batch is empty", "file 7 of 9")),
    "raises a group": End(fail_in_a_group, ("two loaders failed", "the first one", "the second one")),
    "raises in backward": End(fail_in_a_hook, ("ValueError", "a hook's bug")),
    "is interrupted": End(fail_by_interrupt, ("KeyboardInterrupt",)),
    "ends at once": End(lambda _: os._exit(5)),
    "is killed": End(lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    "becomes another program": End(lambda _: os.execv("/bin/true", ["true"])),
}
BACKEND = ("exits with 3", "raises", "is killed")
"""Ends that are tried under torch's DistributedDataParallel on backend "bagua", too."""


def wrapped(way, folder):
    """The model to train on this rank, and its optimizer."""
    net, optimizer = mlp()
    if way == "with_bagua":
        bagua.init_process_group()
        return net, net.with_bagua([optimizer]), optimizer
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo" if way == "gloo" else "bagua"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return net, DistributedDataParallel(net), optimizer


def rank_trains(way, end, folder):
    """On rank 0: the error that ended training."""
    net, model, optimizer = wrapped(way, folder)
    rank = int(os.environ["RANK"])
    for number in range(6):
        if rank == 1 and number == LAST:
            ENDS[end].do(net)
        optimizer.zero_grad()
        try:
            model(torch.ones(2, 4)).mean().backward()
        except Exception as error:
            if rank == 1:
                raise
            sys.stdout.flush()
            return f"{type(error).__name__}: {error}"
        optimizer.step()
    return ""


def found(folder, way, end):
    """Rank 0's error, and rank 1's exit code."""
    (folder / way).mkdir()
    with make_ranks(folder / way) as ranks:
        started = ranks.start(rank_trains, 2, way=way, end=end, folder=str(folder / way))
        ranks.wait(60.0)
        code = started[1].process.returncode
        assert code is not None
        return started[0].result(), code


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """Exit codes of rank 1 under torch's on Gloo; rank 0 has an error there, too."""

    @functools.cache
    def code(end):
        told, found_code = found(tmp_path_factory.mktemp("gloo"), "gloo", end)
        assert told
        return found_code

    return code


def cases():
    """(end, way)"""
    rare = [pytest.param(end, "backend", marks=pytest.mark.full) for end in BACKEND]
    return [*((end, "with_bagua") for end in ENDS), *rare]


@pytest.mark.parametrize(("end", "way"), cases())
def test_a_rank_ends(tmp_path, codes, end, way):
    told, code = found(tmp_path, way, end)
    assert code == codes(end)
    assert "rank 1" in told and "skip" not in told, told
    missing = [word for word in ENDS[end].words if word not in told]
    assert not missing, told
