"""Samples of elastic jobs: each is in exactly one committed step of an epoch, whoever is killed and whenever."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.ranks.engine_hosts import Ranks
from rig.ranks.faults import VARIABLE, Fault, start_beside
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.job.session import current

sys.path.insert(0, str(Path(__file__).parents[1]))

from training_scenarios.support import seeded, sgd, wide_mlp, wrap

SAMPLES, EPOCHS = 41, 2
FOLDER = "BAGUA_TEST_FOLDER"


def dataset() -> TensorDataset:
    samples = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(samples, torch.arange(SAMPLES))


class HeldBehindCommit(dict[int, int]):
    """Units that were exchanged: when that of the lost member's step is noted, another thread enters the next
    generation, if it can."""

    def __init__(self, fault: Fault, step: int) -> None:
        super().__init__()
        self._fault, self._step = fault, step

    def __setitem__(self, scope: int, generation: int) -> None:
        end = time.monotonic() + 2.0
        if self._fault.step == self._step and threading.current_thread() is threading.main_thread():
            while current().connection.settled == 1 and time.monotonic() < end:
                time.sleep(0.001)
        super().__setitem__(scope, generation)


def rank_train(
    workers: int = 0, batches: int = 1, balanced: bool = False, beside: int = 0, **sizes: int
) -> dict[str, Any]:
    """Trains, and writes the indices of each batch to this member's file, so that they are known if it is killed.
    ``beside``: flags go late, and in that step another thread enters the next generation behind the commit."""
    bagua.init_process_group()
    member = current().membership.member
    costs = [index % 7 for index in range(SAMPLES)] if balanced else None
    sampler = bagua.contrib.ElasticSampler(dataset(), **sizes, complexity_fn=costs)
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = sampler.loader(**options)
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    fault = Fault(lambda: model.bagua_buckets)
    if beside:
        running = units(current())
        running.flags.send_early = lambda members: None  # type: ignore[method-assign]
        running.flags.attach = lambda *arguments: False  # type: ignore[method-assign]
        running._exchanged = HeldBehindCommit(fault, beside)
        start_beside()
    step, taken = 0, 0
    with Path(os.environ[FOLDER], str(member)).open("a") as record:
        for epoch in sampler.epochs(EPOCHS):
            for inputs, indices in loader:
                fault.step = step
                print(epoch, step, *indices.tolist(), file=record, flush=True)
                taken += 1
                if taken == 1:
                    optimizer.zero_grad()
                    fault.at("before")
                if taken < batches:
                    with model.bagua_ddp.no_sync():
                        model(inputs).square().mean().backward()
                    continue
                model(inputs).square().mean().backward()
                fault.at("committed")
                optimizer.step()
                step, taken = step + 1, 0
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"member": member, "flat": flat, "steps": step, "opening": sampler._course.opening}


def used(folder: Path, member: int, before_step: int = 10**9) -> list[int]:
    rows = [[int(word) for word in line.split()] for line in (folder / str(member)).read_text().splitlines()]
    return [index for _, step, *indices in rows if step < before_step for index in indices]


def check(ranks: Ranks, folder: Path, killed: dict[int, int], committed: bool = False) -> None:
    """``killed``: member -> the step in which it was. ``committed``: that one has been committed with it for sure."""
    results = [one.result() for one in ranks.started if one.rank not in killed]
    assert all(torch.equal(one["flat"], results[0]["flat"]) for one in results)
    assert {one["steps"] for one in results} == {results[0]["steps"]}
    left = [index for member in range(len(ranks.started)) if member not in killed for index in used(folder, member)]
    left += results[0]["opening"]
    # The step in which a member was killed may have been committed with it, or repeated without.
    possible = []
    for choice in range((1 << len(killed)) - 1 if committed else 0, 1 << len(killed)):
        seen = list(left)
        for number, (member, step) in enumerate(killed.items()):
            seen += used(folder, member, step + (choice >> number & 1))
        possible.append(Counter(seen))
    assert any(seen == Counter(list(range(SAMPLES)) * EPOCHS) for seen in possible), possible


@pytest.mark.parametrize(
    ("kills", "arguments"),
    [
        ("0:1:0:submitted 2:3:0:committed", {"batch_size": 3}),
        ("1:2:0:flags 3:2:0:before", {"batch_size": 3, "workers": 2}),
        ("3:1:0:ready 0:4:0:before", {"global_batch": 10, "workers": 1}),
        ("2:1:0:before", {"batch_size": 2, "batches": 2, "balanced": True}),
    ],
)
def test_each_sample_is_used_once(ranks: Ranks, tmp_path: Path, kills: str, arguments: dict[str, int]) -> None:
    environment = {VARIABLE: kills, FOLDER: str(tmp_path), "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    ranks.start(rank_train, nprocs=4, elastic=True, environment=environment, **arguments)
    ranks.wait(90.0)
    check(ranks, tmp_path, {int(kill.split(":")[0]): int(kill.split(":")[1]) for kill in kills.split()})


@pytest.mark.parametrize("kills", ["", "1:7:0:before"])
def test_the_last_epoch_uses_all_samples_too(ranks: Ranks, tmp_path: Path, kills: str) -> None:
    """41 are no multiple of 9, nor of 6; and no number of ranks divides the rest."""
    environment = {VARIABLE: kills, FOLDER: str(tmp_path), "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    ranks.start(rank_train, nprocs=3, elastic=True, environment=environment, batch_size=3)
    ranks.wait(90.0)
    assert ranks.started[0].result()["opening"] == ()
    check(ranks, tmp_path, {1: 7} if kills else {})


def test_samples_are_committed_with_their_step(ranks: Ranks, tmp_path: Path) -> None:
    """All have heard the flags of step 2, of which member 2 dies: its batch is not given out again."""
    environment = {VARIABLE: "2:2:0:heard", FOLDER: str(tmp_path), "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    ranks.start(rank_train, nprocs=3, elastic=True, environment=environment, batch_size=3, beside=2)
    ranks.wait(90.0)
    check(ranks, tmp_path, {2: 2}, committed=True)


@pytest.mark.parametrize("elastic", [False, True])
def test_unequal_shares_are_weighted(ranks: Ranks, tmp_path: Path, elastic: bool) -> None:
    """Three ranks share batches of 8: the result is that of one process with these batches."""
    ranks.run(rank_train, 3, elastic=elastic, environment={FOLDER: str(tmp_path)}, global_batch=8)
    check(ranks, tmp_path, {})
    sizes = check_weights(ranks, tmp_path, {}, 1)
    assert len(set(sizes)) > 1


@pytest.mark.parametrize(("batches", "first"), [(1, 1), (2, 0)])
def test_a_weighted_step_is_repeated(ranks: Ranks, tmp_path: Path, batches: int, first: int) -> None:
    """Shares are 3, 3, 2, 2. Gradients of those that are left weigh more, or less, without the lost one."""
    kills = f"0:{first}:0:submitted 3:3:0:ready"
    environment = {VARIABLE: kills, FOLDER: str(tmp_path), "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    ranks.start(rank_train, nprocs=4, elastic=True, environment=environment, global_batch=10, batches=batches)
    ranks.wait(90.0)
    check_weights(ranks, tmp_path, {0: first, 3: 3}, batches)


def check_weights(ranks: Ranks, folder: Path, killed: dict[int, int], batches: int) -> list[int]:
    """Weights are those of one process with the samples of each step of so many batches; ``killed``: member -> the step
    that it was not in any more. Returns the samples of each member's batches."""
    parts: dict[int, dict[int, list[list[int]]]] = {}
    for one in ranks.started:
        for line in (folder / str(one.rank)).read_text().splitlines():
            _, step, *indices = map(int, line.split())
            if step < killed.get(one.rank, step + 1):
                parts.setdefault(step, {}).setdefault(one.rank, []).append(indices)
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    inputs = dataset().tensors[0]
    for step in sorted(parts):
        if len(next(iter(parts[step].values()))) < batches:  # the end of the training: nothing came of it
            continue
        optimizer.zero_grad()
        for together in zip(*parts[step].values(), strict=True):
            model(inputs[[index for part in together for index in part]]).square().mean().backward()
        optimizer.step()
    left = next(one for one in ranks.started if one.rank not in killed)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.allclose(left.result()["flat"], flat, rtol=0, atol=1e-12)
    return [len(part) for members in parts.values() for member in members.values() for part in member]


def rank_weights() -> tuple[list[float], float, float]:
    bagua.init_process_group()
    loader = bagua.contrib.ElasticSampler(dataset(), global_batch=4).loader()
    during = [current().weights.batch for _ in loader]
    after_all = current().weights.batch
    for _ in loader:
        break
    return during, after_all, current().weights.batch


def test_weights_end_with_the_iteration(ranks: Ranks) -> None:
    """Batches that a program takes from elsewhere afterwards are not weighted."""
    for rank, (during, *after) in enumerate(ranks.run(rank_weights, 3)):
        assert during[0] == (1.5 if rank == 0 else 0.75) and after == [1.0, 1.0]


def rank_uneven() -> str:
    bagua.init_process_group()
    sampler = bagua.contrib.ElasticSampler(dataset(), batch_size=3)
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    batches = iter(sampler.loader())
    if current().membership.rank == 0:
        next(batches)
    inputs, _ = next(batches)
    try:
        model(inputs).square().mean().backward()
    except BaguaError as error:
        return str(error)
    return ""


def test_ranks_that_take_different_numbers_of_batches_are_told(ranks: Ranks) -> None:
    words = "Ranks took 1 to 2 batches of their ElasticSamplers for one training step"
    assert all(words in text for text in ranks.run(rank_uneven, 2, elastic=True))


def rank_train_with_torchs_sampler(workers: int = 0, given: bool = False) -> dict[str, Any]:
    """A loop for torch's DDP, with a validation after each epoch. ``given``: ranks are arguments of the sampler."""
    bagua.init_process_group()
    member = current().membership.member
    place = {"num_replicas": bagua.get_world_size(), "rank": bagua.get_rank()} if given else {}
    sampler = DistributedSampler(dataset(), **place)
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(dataset(), 3, sampler=sampler, **options)
    validation = DataLoader(dataset(), 3, sampler=DistributedSampler(dataset(), shuffle=False, **place))
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    fault = Fault(lambda: model.bagua_buckets)
    step, seen, lengths = 0, [], []
    with Path(os.environ[FOLDER], str(member)).open("a") as record:
        for epoch in range(EPOCHS + 1):
            sampler.set_epoch(epoch)
            lengths.append((len(loader), step))
            for inputs, indices in loader:
                fault.step = step
                print(epoch, step, *indices.tolist(), file=record, flush=True)
                optimizer.zero_grad()
                fault.at("before")
                model(inputs).square().mean().backward()
                fault.at("committed")
                optimizer.step()
                step += 1
            seen.append([index for _, indices in validation for index in indices.tolist()])
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"flat": flat, "steps": step, "seen": seen, "lengths": lengths, "sampler": list(sampler)}


@pytest.mark.parametrize(
    ("kills", "arguments"),
    [
        ("", {}),
        ("1:0:0:before", {}),
        ("0:1:0:submitted 2:3:0:committed", {"given": True}),  # also the last step of the epoch
        ("2:3:0:flags", {}),
        ("3:2:0:ready", {"workers": 2}),
        ("1:3:0:heard", {}),
        ("1:4:0:before 2:7:0:before", {}),  # in two epochs
    ],
)
def test_torchs_sampler_loses_nothing_but_in_the_last_epoch(
    ranks: Ranks, tmp_path: Path, kills: str, arguments: dict[str, Any]
) -> None:
    environment = {VARIABLE: kills, FOLDER: str(tmp_path), "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    ranks.start(rank_train_with_torchs_sampler, nprocs=4, elastic=True, environment=environment, **arguments)
    ranks.wait(90.0)
    killed = {int(kill.split(":")[0]): int(kill.split(":")[1]) for kill in kills.split()}
    results = [one.result() for one in ranks.started if one.rank not in killed]
    for one in results:
        assert torch.equal(one["flat"], results[0]["flat"])
        assert (one["steps"], one["lengths"]) == (results[0]["steps"], results[0]["lengths"])
    for (length, begin), (_, end) in itertools.pairwise(results[0]["lengths"]):
        assert length == end - begin, results[0]["lengths"]
    # The step in which a member was killed may have been committed with it, or repeated without.
    possible = []
    for choice in itertools.product(range(2), repeat=len(killed)):
        ends = {member: step + more for (member, step), more in zip(killed.items(), choice, strict=True)}
        rows = (used(tmp_path, member, ends.get(member, 10**9)) for member in range(4))
        possible.append(Counter(itertools.chain.from_iterable(rows)))
    assert any(min(seen[index] for index in range(SAMPLES)) > EPOCHS for seen in possible), possible
    validated = Counter(index for one in results for index in one["seen"][-1])
    assert set(validated) == set(range(SAMPLES)) and sum(validated.values()) < SAMPLES + 4
    if not killed:
        plain = DistributedSampler(dataset(), 4, 0)
        rows = [line.split() for line in (tmp_path / "0").read_text().splitlines()]
        for epoch in range(EPOCHS + 1):
            plain.set_epoch(epoch)
            assert [int(index) for row in rows if row[0] == str(epoch) for index in row[2:]] == list(plain)


def rank_outside() -> list[list[int]]:
    """A sampler for other ranks than those of the job, and one behind the job's end, are torch's own."""
    bagua.init_process_group()
    wrap(seeded(wide_mlp))
    pairs = DistributedSampler(dataset(), 2, bagua.get_rank() % 2)
    found = [list(pairs)]
    bagua.destroy_process_group()
    return [*found, list(DistributedSampler(dataset(), 3, bagua.get_rank()))]


def test_other_samplers_are_left(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(rank_outside, 3, elastic=True)):
        assert found == [list(DistributedSampler(dataset(), 2, rank % 2)), list(DistributedSampler(dataset(), 3, rank))]
