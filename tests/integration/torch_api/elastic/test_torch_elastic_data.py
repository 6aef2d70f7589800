"""Samples of elastic jobs: each is in exactly one committed step of an epoch, whoever is killed and whenever."""

import itertools
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from rig.ranks.faults import VARIABLE, Fault, kill_self, start_beside
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_scenarios.support import seeded, sgd, shard, whole_parameters, wide_mlp, wrap

import bagua.torch_api as bagua
from bagua.base import islands
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms.diloco import StreamingDiLoCoAlgorithm
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.job.session import current

SAMPLES, EPOCHS = 41, 2
FOLDER = "BAGUA_TEST_FOLDER"


def dataset():
    samples = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(samples, torch.arange(SAMPLES))


class HeldBehindCommit(dict[int, int]):
    """Units that were exchanged: when that of the lost member's step is noted, another thread enters the next
    generation, if it can."""

    def __init__(self, fault, step):
        super().__init__()
        self._fault, self._step = fault, step

    def __setitem__(self, scope, generation):
        end = time.monotonic() + 2.0
        if self._fault.step == self._step and threading.current_thread() is threading.main_thread():
            while current().connection.settled == 1 and time.monotonic() < end:
                time.sleep(0.001)
        super().__setitem__(scope, generation)


def rank_train(workers=0, batches=1, balanced=False, beside=0, sharded=False, **sizes):
    """Trains, and writes the indices of each batch to this member's file, so that they are known if it is killed.
    ``beside``: flags go late, and in that step another thread enters the next generation behind the commit."""
    bagua.init_process_group()
    member = current().membership.member
    costs = [index % 7 for index in range(SAMPLES)] if balanced else None
    sampler = bagua.contrib.ElasticSampler(dataset(), **sizes, complexity_fn=costs)
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = sampler.loader(**options)
    model = seeded(wide_mlp)
    if sharded:
        shard(model)
    optimizer = sgd(model)
    wrap(model, optimizer)
    fault = Fault(lambda: model.bagua_buckets)
    if beside:
        running = units(current())
        running.flags.send_early = lambda members: None
        running.flags.attach = lambda *arguments: False
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
    flat = torch.cat([one.flatten() for one in whole_parameters(model)])
    return {"member": member, "flat": flat, "steps": step, "opening": sampler._course.opening}


def narrow():
    """The last layer has one row: a rank of each island has nothing of it."""
    return nn.Sequential(nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def rank_streams(overlap):
    """This rank's part of the anchor, to which all islands have moved, and how many buckets each fragment has here."""
    bagua.init_process_group()
    model = shard(seeded(narrow))
    optimizer = sgd(model)
    streaming = StreamingDiLoCoAlgorithm(interval=6, fragments=3, overlap=overlap, codec=None)
    model.with_bagua([optimizer], streaming)
    fault = Fault(lambda: model.bagua_buckets)
    for step in range(14):
        fault.step = step
        optimizer.zero_grad()
        fault.at("before")
        model(dataset().tensors[0][bagua.get_rank() :: 6]).square().mean().backward()
        optimizer.step()
    model.bagua_algorithm.close()
    buckets = model.bagua_buckets
    anchor = torch.cat([bucket.slot("anchor") for bucket in buckets])
    counts = [sum(bucket.name.startswith(f"{fragment}.") for bucket in buckets) for fragment in range(3)]
    return {"place": bagua.get_rank() % 2, "anchor": anchor, "buckets": counts}


def used(folder, member, before_step=10**9):
    rows = [[int(word) for word in line.split()] for line in (folder / str(member)).read_text().splitlines()]
    return [index for _, step, *indices in rows if step < before_step for index in indices]


def run(ranks, folder, function, nprocs, kills="", elastic=True, island_size=1, **arguments):
    """(results of those that are left; member that was killed -> in which step)"""
    environment = {VARIABLE: kills, FOLDER: str(folder), "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    environment[islands.VARIABLE] = str(island_size)
    ranks.start(function, nprocs, elastic=elastic, environment=environment, **arguments)
    pairs = (map(int, kill.split(":")[:2]) for kill in kills.split() if not kill.endswith("unheard"))
    killed = {
        member: step for one, step in pairs for member in range(nprocs) if member // island_size == one // island_size
    }
    results = ranks.left(killed)
    assert all(torch.equal(one["flat"], results[0]["flat"]) for one in results)
    assert {one["steps"] for one in results} == {results[0]["steps"]}
    return results, killed


def possible_uses(ranks, folder, killed, committed=False, readers=1):
    """How often each sample was used: the step in which a member was killed may have been committed with it, or
    repeated without. ``committed``: it has been committed for sure. ``readers``: so many read the same."""
    for choice in itertools.product((1,) if committed else (0, 1), repeat=len(killed)):
        ends = {member: step + more for (member, step), more in zip(killed.items(), choice, strict=True)}
        yield Counter(
            index
            for member in range(0, len(ranks.started), readers)
            for index in used(folder, member, ends.get(member, 10**9))
        )


def check(ranks, folder, results, killed, *options):
    possible = [uses + Counter(results[0]["opening"]) for uses in possible_uses(ranks, folder, killed, *options)]
    assert Counter(list(range(SAMPLES)) * EPOCHS) in possible, possible


@pytest.mark.parametrize(
    ("kills", "arguments"),
    [
        ("0:1:0:submitted 2:3:0:committed", {"batch_size": 3}),
        ("1:2:0:flags 3:2:0:before", {"batch_size": 3, "workers": 2}),
        pytest.param("3:1:0:ready 0:4:0:before", {"global_batch": 10, "workers": 1}, marks=pytest.mark.full),
        ("2:1:0:before", {"batch_size": 2, "batches": 2, "balanced": True}),
    ],
)
def test_each_sample_is_used_once(ranks, tmp_path, kills, arguments):
    check(ranks, tmp_path, *run(ranks, tmp_path, rank_train, 4, kills, **arguments))


@pytest.mark.parametrize("phase", ["before", "bucket", "ready", "flags", "heard", "committed"])
def test_a_lost_rank_costs_its_island(ranks, tmp_path, phase):
    """The others repeat the step, or commit it, alike on all shards, wherever the rest of the island was."""
    kills = f"3:2:0:{phase}"
    found = run(ranks, tmp_path, rank_train, 6, kills, island_size=2, sharded=True, batch_size=2)
    assert [one["member"] for one in found[0]] == [0, 1, 4, 5]
    check(ranks, tmp_path, *found, phase == "committed")


def rank_hears_first():
    """In step 1 torch tells rank 2 of the loss of its mate, before the daemon does."""
    bagua.init_process_group()
    member = current().membership.member
    model = shard(seeded(wide_mlp))
    optimizer = sgd(model)
    wrap(model, optimizer)
    for step in range(3):
        if step == 1 and member == 2:
            raise RuntimeError("Connection closed by peer")
        if step == 1 and member == 3:
            time.sleep(0.3)
            kill_self()
        optimizer.zero_grad()
        model(dataset().tensors[0][member::4]).square().mean().backward()
        optimizer.step()
    return current().membership.world_size


def test_an_error_of_torch_comes_before_the_loss(ranks):
    ranks.start(rank_hears_first, 4, elastic=True, environment={islands.VARIABLE: "2"})
    assert ranks.left((2, 3)) == [2, 2]


def rank_is_late():
    """Island 2 is lost in the first pass while island 0 waits at its end, and before island 1 has come to it."""
    bagua.init_process_group()
    member = current().membership.member
    torch.manual_seed(3)
    model = shard(nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))).double())
    optimizer = sgd(model)
    wrap(model, optimizer)

    def pause(_):
        # Orders the islands. A slow machine may have another order, and all orders must end alike.
        time.sleep((0.0, 1.0, 0.4)[member // 2])
        if member == 4:
            kill_self()

    for step in range(3):
        optimizer.zero_grad()
        outputs = model(torch.full((2, 6), 1.0 + member // 2 + step, dtype=torch.float64))
        if step == 0:
            outputs.register_hook(pause)
        outputs.square().mean().backward()
        optimizer.step()
    return [one.tolist() for one in whole_parameters(model)]


def test_an_island_is_lost_in_the_first_pass_before_another_has_come_to_its_end(ranks):
    ranks.start(rank_is_late, 6, elastic=True, environment={islands.VARIABLE: "2"})
    found = ranks.left((4, 5))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("phase", ["ready", "committed"])
def test_ranks_of_an_island_read_the_same(ranks, tmp_path, phase):
    """Each sample is used once by one island, also in the last epoch."""
    kills = f"3:2:0:{phase}"
    options = {"island_size": 2, "sharded": True, "global_batch": 5, "per_island": True}
    results, killed = run(ranks, tmp_path, rank_train, 6, kills, **options)
    assert results[0]["opening"] == ()
    assert all(used(tmp_path, first) == used(tmp_path, first + 1) for first in (0, 4))
    check(ranks, tmp_path, results, killed, phase == "committed", 2)


def test_a_rank_waits_in_its_island_while_its_mate_enters_the_next_generation(ranks, tmp_path):
    """All have heard the flags of step 2, of which member 3 dies; member 0 hears of the loss instead. Its mate waits
    for it in the next forward pass, in torch's own all-gather."""
    kills = "3:2:0:heard 0:2:0:unheard"
    found = run(ranks, tmp_path, rank_train, 6, kills, island_size=2, sharded=True, batch_size=2)
    check(ranks, tmp_path, *found, True)


@pytest.mark.parametrize(("overlap", "phase"), [(0, "before"), (2, "start"), (2, "ready")])
def test_fragments_of_shards_travel_in_different_numbers_of_buckets(ranks, overlap, phase):
    """A rank is lost while a fragment is under way."""
    environment = {VARIABLE: f"3:5:0:{phase}", "BAGUA_DEFAULT_BUCKET_SIZE": "8", islands.VARIABLE: "2"}
    ranks.start(rank_streams, 6, elastic=True, environment=environment, overlap=overlap)
    found = ranks.left([2, 3])
    for place in (0, 1):
        first, other = (one for one in found if one["place"] == place)
        assert torch.equal(first["anchor"], other["anchor"])
    assert [one["buckets"] for one in found[:2]] == [[2, 2, 2], [0, 2, 2]]


def test_the_last_epoch_uses_all_samples_too(ranks, tmp_path):
    """41 are no multiple of 9, nor of 6; and no number of ranks divides the rest."""
    results, killed = run(ranks, tmp_path, rank_train, 3, "1:7:0:before", batch_size=3)
    assert results[0]["opening"] == ()
    check(ranks, tmp_path, results, killed)


def test_samples_are_committed_with_their_step(ranks, tmp_path):
    """All have heard the flags of step 2, of which member 2 dies: its batch is not given out again."""
    found = run(ranks, tmp_path, rank_train, 3, "2:2:0:heard", batch_size=3, beside=2)
    check(ranks, tmp_path, *found, True)


@pytest.mark.parametrize("elastic", [False, True])
def test_unequal_shares_are_weighted(ranks, tmp_path, elastic):
    """Three ranks share batches of 8: the result is that of one process with these batches."""
    results, _ = run(ranks, tmp_path, rank_train, 3, elastic=elastic, global_batch=8)
    check(ranks, tmp_path, results, {})
    assert len(set(check_weights(ranks, tmp_path, {}, 1))) > 1


@pytest.mark.parametrize(("batches", "first"), [pytest.param(1, 1, marks=pytest.mark.full), (2, 0)])
def test_a_weighted_step_is_repeated(ranks, tmp_path, batches, first):
    """Shares are 3, 3, 2, 2. Gradients of those that are left weigh more, or less, without the lost one."""
    kills = f"0:{first}:0:submitted 3:3:0:ready"
    _, killed = run(ranks, tmp_path, rank_train, 4, kills, global_batch=10, batches=batches)
    check_weights(ranks, tmp_path, killed, batches)


def check_weights(ranks, folder, killed, batches):
    """Weights are those of one process with the samples of each step of so many batches; ``killed``: member -> the step
    that it was not in any more. Returns the samples of each member's batches."""
    parts = {}
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


def rank_takes():
    """Weights of batches in an iteration, after it, and after one that was left; and what ranks are told that take
    other numbers of batches, or batches out of order."""
    bagua.init_process_group()
    sampler = bagua.contrib.ElasticSampler(dataset(), global_batch=4)
    with pytest.raises(ValueError, match="can't take in_order=False"):
        sampler.loader(in_order=False)
    loader = sampler.loader()
    weights = [current().weights.batch for _ in loader][:1]
    weights.append(current().weights.batch)
    for _ in loader:
        break
    weights.append(current().weights.batch)
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    batches = iter(bagua.contrib.ElasticSampler(dataset(), batch_size=3).loader())
    if current().membership.rank == 0:
        next(batches)
    with pytest.raises(BaguaError, match="Ranks took 2 to 3 batches of their ElasticSamplers for one training step"):
        model(next(batches)[0]).square().mean().backward()
    return weights


def test_weights_end_with_the_iteration(ranks):
    """Batches that a program takes from elsewhere afterwards are not weighted."""
    for rank, weights in enumerate(ranks.survive(rank_takes, (), 3)):
        assert weights == [1.5 if rank == 0 else 0.75, 1.0, 1.0]


def rank_train_with_torchs_sampler(workers=0, given=False):
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
        ("0:1:0:submitted 2:3:0:committed", {"given": True}),  # also the last step of the epoch
        ("3:2:0:ready", {"workers": 2}),
        pytest.param("1:4:0:before 2:7:0:before", {}, marks=pytest.mark.full),  # in two epochs
    ],
)
def test_torchs_sampler_loses_nothing_but_in_the_last_epoch(ranks, tmp_path, kills, arguments):
    results, killed = run(ranks, tmp_path, rank_train_with_torchs_sampler, 4, kills, **arguments)
    assert all(one["lengths"] == results[0]["lengths"] for one in results)
    for (length, begin), (_, end) in itertools.pairwise(results[0]["lengths"]):
        assert length == end - begin, results[0]["lengths"]
    possible = list(possible_uses(ranks, tmp_path, killed))
    assert any(min(seen[index] for index in range(SAMPLES)) > EPOCHS for seen in possible), possible
    validated = Counter(index for one in results for index in one["seen"][-1])
    assert set(validated) == set(range(SAMPLES)) and sum(validated.values()) < SAMPLES + 4
    if not killed:
        plain = DistributedSampler(dataset(), 4, 0)
        rows = [line.split() for line in (tmp_path / "0").read_text().splitlines()]
        for epoch in range(EPOCHS + 1):
            plain.set_epoch(epoch)
            assert [int(index) for row in rows if row[0] == str(epoch) for index in row[2:]] == list(plain)


def rank_outside():
    """A sampler for other ranks than those of the job, and one behind the job's end, are torch's own."""
    bagua.init_process_group()
    wrap(seeded(wide_mlp))
    pairs = DistributedSampler(dataset(), 2, bagua.get_rank() % 2)
    found = [list(pairs)]
    bagua.destroy_process_group()
    return [*found, list(DistributedSampler(dataset(), 3, bagua.get_rank()))]


def test_other_samplers_are_left(ranks):
    for rank, found in enumerate(ranks.run(rank_outside, 3, elastic=True)):
        assert found == [list(DistributedSampler(dataset(), 2, rank % 2)), list(DistributedSampler(dataset(), 3, rank))]
