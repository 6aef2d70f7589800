"""Checkpoints of jobs whose ranks change: another number of them, another algorithm, ranks that are lost or join."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.checkpoints import WIDTH, Net, await_true, folder_of
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.saving import folder as on_disk


def rank_grows(folder: str, steps: int, algorithm: str) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Parameters after it has resumed, and at the end."""
    bagua.init_process_group()
    torch.manual_seed(5)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.with_bagua([optimizer], Algorithm.init(algorithm))
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=steps)
    start = checkpointer.resume()
    begun = model.weight.detach().clone()
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 10 + bagua.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        checkpointer.step()
    return start.ranks if start else 0, begun, model.weight.detach().clone()


@pytest.mark.full
def test_another_algorithm(make_ranks: Any, tmp_path: Path) -> None:
    """Where replicas were different ones, all begin with rank 0's."""
    ends = []
    for algorithm in ("decentralized", "diloco"):
        here = tmp_path / algorithm
        here.mkdir()
        with make_ranks(here) as made:
            ends.append(made.run(rank_grows, 2, folder=str(tmp_path / "c"), steps=3, algorithm=algorithm))
    assert not torch.equal(ends[0][0][2], ends[0][1][2])
    assert all(torch.equal(begun, ends[0][0][2]) for _, begun, _ in ends[1])


@pytest.mark.parametrize(
    "algorithm",
    [
        "decentralized",
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in ("gradient_allreduce", "low_precision_decentralized", "async")
        ),
    ],
)
def test_another_number_of_ranks(make_ranks: Any, tmp_path: Path, algorithm: str) -> None:
    ends: list[torch.Tensor] = []
    for number, ranks in enumerate((2, 3, 1)):
        here = tmp_path / str(number)
        here.mkdir()
        with make_ranks(here) as made:
            found = made.run(rank_grows, ranks, folder=str(tmp_path / "c"), steps=3, algorithm=algorithm)
        if ends:
            for rank, (before, begun, _) in enumerate(found):
                assert before == len(ends)
                own = algorithm == "decentralized" and rank < len(ends)
                assert torch.equal(begun, ends[rank if own else 0]), "newcomers, and who begins anew, have rank 0's"
        ends = [end for _, _, end in found]


def rank_loses(folder: str, steps: int, dies: int = 0, ranks: int = 1) -> tuple[int, bool, torch.Tensor]:
    """In an elastic job. ``dies``: in that step the last rank is killed. It goes on until so many ``ranks`` have done a
    step together, and then until the number of its steps is a multiple of ``steps``."""
    bagua.init_process_group()
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=2)
    resumed = checkpointer.resume() is not None
    trained = ranks if resumed else 0
    while True:
        bagua.wait_to_join()
        if trained >= ranks and checkpointer.steps and checkpointer.steps % steps == 0:
            break
        trained = bagua.get_world_size()
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        if dies and checkpointer.steps + 1 == dies and bagua.get_rank() == bagua.get_world_size() - 1:
            checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.step()
    bagua.communication.destroy_process_group()
    return checkpointer.steps, resumed, torch.cat([one.detach().flatten() for one in model.parameters()])


def test_a_rank_is_lost(make_ranks: Any, tmp_path: Path) -> None:
    """Its checkpoint is given up, in words; the next one is that of the ranks that are left."""
    folder, here = tmp_path / "c", tmp_path / "first"
    here.mkdir()
    with make_ranks(here) as made:
        made.start(rank_loses, 3, elastic=True, folder=str(folder), steps=6, dies=4)
        made.wait()
        found = [rank.result() for rank in made.started[:2]]
        told = made.started[0].output
    assert torch.equal(found[0][2], found[1][2])
    ranks = {path.name: on_disk.read_manifest(path).ranks for path in on_disk.checkpoints(folder)}
    assert ranks == {folder_of(2): 3, folder_of(6): 2}
    assert "There is no checkpoint of step 4" in told and "rank 2 was lost before its part was written" in told
    here = tmp_path / "second"
    here.mkdir()
    with make_ranks(here) as made:
        again = made.run(rank_loses, 2, elastic=True, folder=str(folder), steps=6)
    assert all(resumed and torch.equal(flat, found[0][2]) for _, resumed, flat in again)


def test_a_rank_joins(make_ranks: Any, tmp_path: Path) -> None:
    """It takes over how many steps there were, and writes its share of the next checkpoint."""
    folder, here = tmp_path / "c", tmp_path / "first"
    here.mkdir()
    with make_ranks(here) as made:
        made.start(rank_loses, 2, elastic=True, folder=str(folder), steps=6, ranks=3)
        await_true((folder / folder_of(2)).exists)
        made.join(rank_loses, [2], folder=str(folder), steps=6, ranks=3)
        made.wait()
        found = [rank.result() for rank in made.started]
    assert [(steps, resumed) for steps, resumed, _ in found] == [(found[0][0], False)] * 3
    assert all(torch.equal(flat, found[0][2]) for _, _, flat in found)
    newest = on_disk.checkpoints(folder)[0]
    assert newest.name == folder_of(found[0][0]) and on_disk.read_manifest(newest).ranks == 3
