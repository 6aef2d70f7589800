"""Checkpoints in the background: a job that goes on from one has the bits of a job that never stopped."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.saving import folder as on_disk

WIDTH = 8


def await_true(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.001)


class Net(nn.Module):
    """With buffers that differ between ranks, and random numbers of each rank."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(4 * width, width),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


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


def rank_tells(folder: str, width: int = WIDTH, states: bool = False, limit: int = 0) -> tuple[str, list[str], int]:
    """(the error of resuming or the step, names in the folder, checkpoints that failed)."""
    bagua.init_process_group()
    torch.manual_seed(3)
    model = Net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    if states:
        bagua.register_state("more", torch.optim.lr_scheduler.StepLR(optimizer, 2))
    try:
        checkpointer = bagua.checkpoint.Checkpointer(folder, every=1, keep=3)
        if limit:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        start = checkpointer.resume()
        text = str(start.step) if start else "none"
        for step in range(3):
            if step == 2 and limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            model(torch.randn(4, width)).sum().backward()
            optimizer.step()
            checkpointer.step()
            checkpointer.wait()
    except BaguaError as error:
        text, checkpointer = str(error), None
    bagua.communication.destroy_process_group()
    names = sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    return text, names, checkpointer.failed if checkpointer else 0


def step(number: int) -> str:
    return f"step_{number:010d}"


def test_bad_checkpoints_and_folders(make_ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def run(number: int, **arguments: Any) -> tuple[str, list[str], int, str]:
        here = tmp_path / str(number)
        here.mkdir()
        with make_ranks(here) as made:
            told = made.run(rank_tells, 1, **{"folder": str(folder), **arguments})[0]
            return *told, made.started[0].output if made.started else (here / "rank-0.log").read_text()

    text, names, failed, _ = run(0)
    assert (text, names, failed) == ("none", [step(1), step(2), step(3)], 0)

    data = next((folder / step(3)).glob("__0_*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    metadata = folder / step(2) / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-7])
    text, names, failed, told = run(1)
    assert (text, failed) == ("1", 0)
    assert names == [f"damaged-{step(2)}", f"damaged-{step(3)}", step(2), step(3), step(4)]
    assert f"{step(3)} is damaged: the contents of {data.name} have changed" in told
    assert f"{step(2)} is damaged: .metadata has" in told and "The one before is taken" in told

    assert "is a checkpoint of another program. Its model 1 differs." in run(2, width=4)[0]
    assert "this program has model 1, state more" in run(3, states=True)[0]

    for number in (2, 3, 4):
        (folder / step(number) / "bagua.json").unlink()
    text = run(4)[0]
    assert "No checkpoint in" in text and f"{step(4)}: it has no bagua.json" in text and "another folder" in text

    (tmp_path / "file").touch()
    assert "Checkpoints can't be written into" in run(5, folder=str(tmp_path / "file" / "c"))[0]

    text, names, failed, told = run(6, folder=str(tmp_path / "full"), limit=3000)
    assert (text, names, failed) == ("none", [step(3)], 2), "training goes on, and the next one is written"
    assert "There is no checkpoint of step 1" in told and "Training goes on" in told


def rank_writes(folder: str, every: int, elements: int, again: bool = False, steps: int = 10**6) -> tuple[int, float]:
    """A model whose weights are all the number of the step, and whose optimizer's state is large."""
    bagua.init_process_group()
    model = nn.Linear(elements // 16, 16, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.with_bagua([optimizer])
    checkpointer = bagua.checkpoint.Checkpointer(folder, every=every, keep=2)
    if again:
        start = checkpointer.resume()
        assert start is not None and bool((model.weight == -float(start.step)).all())
    while checkpointer.steps < steps:
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        checkpointer.step()
    bagua.communication.destroy_process_group()
    return checkpointer.steps, model.weight[0, 0].item()


@pytest.mark.parametrize("victims", [(0, 1), pytest.param((1,), marks=pytest.mark.full)])
def test_killed_in_the_middle_of_writing(make_ranks: Any, tmp_path: Path, victims: tuple[int, ...]) -> None:
    folder, here = tmp_path / "c", tmp_path / "first"
    here.mkdir()
    with make_ranks(here) as made:
        made.start(rank_writes, 2, folder=str(folder), every=1, elements=1 << 18)

        def half_written() -> bool:
            writing = [path for path in folder.glob("writing-*") if not (path / "bagua.json").exists()]
            return len(on_disk.checkpoints(folder)) > 1 and any(any(one.glob("__*")) for one in writing)

        await_true(half_written)
        for victim in victims:
            os.kill(made.started[victim].process.pid, signal.SIGKILL)
        for rank in made.started:
            rank.process.wait(60.0)
    newest = on_disk.checkpoints(folder)[0]
    manifest = on_disk.read_manifest(newest)
    on_disk.verify(newest, manifest, manifest.files)
    here = tmp_path / "second"
    here.mkdir()
    with make_ranks(here) as made:
        end = manifest.step + 2
        found = made.run(rank_writes, 2, folder=str(folder), every=1, elements=1 << 18, again=True, steps=end)
    assert found == [(end, -float(end))] * 2
    assert sorted(path.name for path in folder.iterdir()) == [step(end - 1), step(end)], "nothing is left over"


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
    assert ranks == {step(2): 3, step(6): 2}
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
        await_true((folder / step(2)).exists)
        made.join(rank_loses, [2], folder=str(folder), steps=6, ranks=3)
        made.wait()
        found = [rank.result() for rank in made.started]
    assert [(steps, resumed) for steps, resumed, _ in found] == [(found[0][0], False)] * 3
    assert all(torch.equal(flat, found[0][2]) for _, _, flat in found)
    newest = on_disk.checkpoints(folder)[0]
    assert newest.name == step(found[0][0]) and on_disk.read_manifest(newest).ranks == 3


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
    assert [path.name for path in on_disk.checkpoints(tmp_path / "c")] == [step(found[0])]


def rank_forgets(folder: str) -> list[str]:
    bagua.init_process_group()
    torch.manual_seed(2)
    model = nn.Linear(300, 2000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.with_bagua([optimizer])
    told = []
    checkpointer = bagua.checkpoint.Checkpointer(every=1)  # the folder is that of --checkpoint-dir
    try:
        bagua.checkpoint.Checkpointer(folder)
    except BaguaError as error:
        told.append(str(error))
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    try:
        checkpointer.step()
    except BaguaError as error:
        told.append(str(error))
    torch.save(model.state_dict(), Path(folder) / f"model-{bagua.get_rank()}")
    torch.save(optimizer.state_dict(), Path(folder) / "optimizer")
    bagua.communication.destroy_process_group()
    return told


def test_plain_torch_reads_it(make_ranks: Any, tmp_path: Path) -> None:
    """Also: a folder from the environment; a run that does not resume is refused; each tensor is there once."""
    folder = tmp_path / "c"
    for number in range(2):
        here = tmp_path / str(number)
        here.mkdir()
        with make_ranks(here) as made:
            environment = {"BAGUA_CHECKPOINT_DIR": str(folder)}
            found = made.run(rank_forgets, 3, folder=str(here), environment=environment)
        assert ["There is a Checkpointer already" in told[0] for told in found] == [True] * 3
        assert [len(told) for told in found] == [1 + number] * 3
    assert "has checkpoints of an earlier run. Call resume()" in found[0][1]

    at = folder / step(1)
    whole = torch.load(tmp_path / "0" / "model-0")
    sizes = [(at / f"__{rank}_0.distcp").stat().st_size for rank in range(3)]
    assert sum(sizes) < 3.1 * whole["weight"].nbytes, "weights, and two moments"
    assert max(sizes) < 1.2 * min(sizes)
    empty = {"model": {name: torch.zeros_like(one) for name, one in whole.items()}}
    with pytest.warns(UserWarning, match="in a single process"):
        checkpoint.load(empty, storage_reader=checkpoint.FileSystemReader(at))
    assert all(torch.equal(empty["model"][name], one) for name, one in whole.items())

    dcp_to_torch_save(at, tmp_path / "all.pt")
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(saved["model"][name], one) for name, one in whole.items())
    moments = torch.load(tmp_path / "0" / "optimizer")["state"]
    for number, name in enumerate(whole):
        assert all(torch.equal(saved["optimizer"]["state"][name][key], one) for key, one in moments[number].items())
    assert saved["bagua"]["job"]["model 1"]["model"]["steps"] == 1
