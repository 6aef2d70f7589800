"""Checkpoints in the background: a job that goes on from one has the bits of a job that never stopped."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.checkpoints import WIDTH, Net, folder_of
from torch import nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.saving import folder as on_disk


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = bagua.moe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 1, k=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found, loss, _ = self.layer(inputs)
        return found + 0.1 * loss


def optimizer_of(algorithm: str, model: nn.Module) -> torch.optim.Optimizer:
    if algorithm == "qadam":
        return bagua.algorithms.q_adam.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    if algorithm == "one_bit_adam":
        return bagua.algorithms.one_bit_adam.OneBitAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    found = [tensor.detach().double().flatten() for tensor in [*model.parameters(), *model.buffers()]]
    for parameter in model.parameters():
        found += [
            one.double().flatten() for one in optimizer.state[parameter].values() if isinstance(one, torch.Tensor)
        ]
    return torch.cat([*found, torch.rand(1).double()])


def rank_trains(
    folder: str,
    steps: int,
    algorithm: str = "gradient_allreduce",
    every: int = 3,
    options: dict[str, Any] | None = None,
) -> tuple[int, torch.Tensor]:
    bagua.init_process_group()
    torch.manual_seed(17 + bagua.get_rank())
    model = Experts() if options == {"experts": True} else Net()
    optimizer = optimizer_of(algorithm, model)
    fused = options == {"fused": True}
    options = {} if isinstance(model, Experts) or fused else options
    model.with_bagua([optimizer], Algorithm.init(algorithm, **(options or {})))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=every, keep=2, schedulers=[scheduler])
    start = checkpointer.resume()
    make_step: Any = bagua.contrib.fuse_optimizer(optimizer).fuse_step if fused else optimizer.step
    while checkpointer.steps < steps:
        optimizer.zero_grad()
        inputs = torch.randn(6, WIDTH)
        model(inputs).sub(inputs).square().mean().backward()
        make_step()
        scheduler.step()
        checkpointer.step()
    found = state_of(model, optimizer)
    bagua.communication.destroy_process_group()
    return start.step if start else 0, found


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("gradient_allreduce", {}),
        pytest.param("gradient_allreduce", {"experts": True}, marks=pytest.mark.full),
        pytest.param("gradient_allreduce", {"fused": True}, marks=pytest.mark.full),
        ("power_sgd", {"rank": 1}),
        pytest.param("local_sgd", {"interval": 2}, marks=pytest.mark.full),
        pytest.param("diloco", {"interval": 2}, marks=pytest.mark.full),
        pytest.param("decentralized", {"peer_selection_mode": "all"}, marks=pytest.mark.full),
        pytest.param("low_precision_decentralized", {}, marks=pytest.mark.full),
        pytest.param("qadam", {}, marks=pytest.mark.full),
        pytest.param("top_k", {"density": 0.1, "everywhere": True}, marks=pytest.mark.full),
    ],
)
def test_continues_with_the_same_bits(make_ranks: Any, tmp_path: Path, algorithm: str, options: dict[str, Any]) -> None:
    def run(name: str, folder: str, steps: int) -> list[Any]:
        here = tmp_path / name
        here.mkdir()
        with make_ranks(here) as ranks:
            found: list[Any] = ranks.run(
                rank_trains, 2, folder=str(tmp_path / folder), steps=steps, algorithm=algorithm, options=options
            )
            return found

    whole = run("a", "whole", 8)
    run("b", "cut", 7)
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["step_0000000003", "step_0000000006"]
    again = run("c", "cut", 8)
    assert [start for start, _ in again] == [6, 6]
    for (_, wanted), (_, found) in zip(whole, again, strict=True):
        assert torch.equal(wanted, found)


def rank_counts(
    folder: str, record: str, steps: int, sampler: str, every: int, stop: str = "", **sizes: int
) -> list[tuple[str, Any]]:
    """Trains, and writes down which samples it used in which step. ``stop``: a file; when it is there, it goes on
    without writing steps down that no checkpoint holds."""
    bagua.init_process_group()
    data = TensorDataset(torch.randn(42, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(42))
    loader: Any
    if sampler == "elastic":
        elastic = bagua.contrib.ElasticSampler(data, **sizes)
        epochs, loader = elastic.epochs(100), elastic.loader()
    else:
        balanced = bagua.contrib.LoadBalancingDistributedSampler(data, [float(i % 5) for i in range(42)])
        epochs, loader = iter(range(100)), torch.utils.data.DataLoader(data, batch_size=2, sampler=balanced)
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=every)
    checkpointer.resume()
    used = []
    for epoch in epochs:
        if sampler != "elastic":
            if epoch < balanced.epoch:
                continue
            balanced.set_epoch(epoch)
        for inputs, indices in loader:
            optimizer.zero_grad()
            model(inputs.repeat(2, 1)).square().mean().backward()
            optimizer.step()
            checkpointer.step()
            used.append((checkpointer.steps, epoch, indices.tolist()))
            if checkpointer.steps == steps:
                checkpointer.wait()
                return used
    raise AssertionError("there were too few samples")


@pytest.mark.parametrize(
    ("sampler", "sizes", "worlds", "cuts", "elastic"),
    [
        ("elastic", {"global_batch": 6}, (2, 3, 1), (4, 10, 21), False),
        ("elastic", {"batch_size": 3}, (3, 2), (4, 12), True),
        ("balanced", {}, (2, 3), (3, 11), False),
    ],
)
def test_each_sample_is_used_once(
    make_ranks: Any,
    tmp_path: Path,
    sampler: str,
    sizes: dict[str, int],
    worlds: tuple[int, ...],
    cuts: tuple[int, ...],
    elastic: bool,
) -> None:
    """Each run has another number of ranks. It goes on for a step after its last checkpoint: that one is done again."""
    counted: Counter[tuple[int, int]] = Counter()
    for number, (ranks, cut) in enumerate(zip(worlds, cuts, strict=True)):
        here = tmp_path / str(number)
        here.mkdir()
        with make_ranks(here) as made:
            last = number == len(worlds) - 1
            found = made.run(
                rank_counts,
                ranks,
                elastic=elastic,
                folder=str(tmp_path / "checkpoints"),
                record="",
                steps=cut if last else cut + 1,
                sampler=sampler,
                every=cut,
                **sizes,
            )
        begun = cuts[number - 1] if number else 0
        assert all(used[0][0] == begun + 1 for used in found), "it did not go on from the checkpoint"
        for step, epoch, indices in [one for used in found for one in used]:
            if step <= cut:
                counted.update((epoch, index) for index in indices)
    whole = [epoch for epoch in range(3) if sum(which == epoch for which, _ in counted) == 42]
    assert whole, "no epoch was finished"
    assert all(counted[epoch, index] == 1 for epoch in whole for index in range(42))
    assert max(counted.values()) == 1


def rank_keeps_time(folder: str) -> int:
    """Returns after how many steps there was a checkpoint."""
    bagua.init_process_group()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=timedelta(seconds=0.3), keep=1)
    while True:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if checkpointer.step():
            return checkpointer.steps


def test_ranks_agree_on_the_time(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(rank_keeps_time, 3, folder=str(tmp_path / "c"))
    assert found == [found[0]] * 3
    assert [path.name for path in on_disk.checkpoints(tmp_path / "c")] == [folder_of(found[0])]
