"""Kind 4: rank 1 ends in the middle of training. It has the exit code of any program that ends so, and rank 0, which
waits for it, is told at once: which rank ended, and how."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from habits.case import mlp
from rig.ranks.engine_hosts import make_ranks

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
    """``do``: called by rank 1, with its net. ``words``: rank 0 reads them. ``code``: rank 1's, as of any program."""

    do: Callable[[Any], Any]
    words: tuple[str, ...] = ()
    code: int = 1


ENDS = {
    "exits with 3": End(lambda _: sys.exit(3), ("exit(3)",), 3),
    "exits with words": End(lambda _: sys.exit("no data left"), ("no data left",)),
    "raises": End(fail_with_notes, ("ValueError", "the last batch is empty", "file 7 of 9")),
    "raises a group": End(fail_in_a_group, ("two loaders failed", "the first one", "the second one")),
    "raises in backward": End(fail_in_a_hook, ("ValueError", "a hook's bug")),
    "is interrupted": End(fail_by_interrupt, ("KeyboardInterrupt",), -signal.SIGINT),
    "ends at once": End(lambda _: os._exit(5), code=5),
    "is killed": End(lambda _: os.kill(os.getpid(), signal.SIGKILL), code=-signal.SIGKILL),
    "becomes another program": End(lambda _: os.execv("/bin/true", ["true"]), code=0),
}


def rank_trains(end):
    """On rank 0: the error that ended training."""
    bagua.init_process_group()
    net, optimizer = mlp()
    model = net.with_bagua([optimizer])
    rank = bagua.get_rank()
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


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_ends(tmp_path, end):
    with make_ranks(tmp_path) as ranks:
        started = ranks.start(rank_trains, 2, end=end)
        ranks.wait(60.0)
        told = started[0].result()
        assert started[1].process.returncode == ENDS[end].code
    assert "rank 1" in told and "skip" not in told, told
    missing = [word for word in ENDS[end].words if word not in told]
    assert not missing, told
