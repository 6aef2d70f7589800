"""Elastic jobs: ranks are killed, and the others go on. Results are those of one process with the same members."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.files import await_file
from rig.ranks.engine_hosts import Ranks
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.base import replica_check
from bagua.base.errors import ConfigError, MembershipChanged
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.job import start as beginning
from bagua.torch_api.job.connection import Regrouped
from bagua.torch_api.job.session import current
from bagua.torch_api.job.torch_distributed import TorchGroup, connects_lazily

sys.path.insert(0, str(Path(__file__).parents[1]))

from compat_scenarios.decentralized import DecentralizedImpl
from compat_scenarios.own_algorithm import Reified, start
from compat_scenarios.support import loss
from rig.ranks.faults import VARIABLE, Fault, kill_self
from training_scenarios.support import seeded, sgd, wide_mlp, wide_square, wrap

STEPS = 5


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def rank_train(average: bool = True, wrapping: bool = False) -> dict[str, Any]:
    """Trains; returns parameters after each step. ``wrapping``: step 0 of faults is ``with_bagua``."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    fault = Fault(lambda: model.bagua_buckets)
    fault.step = 0 if wrapping else -1
    wrap(model, optimizer, average=average)
    found = []
    for step in range(STEPS):
        fault.step = step
        optimizer.zero_grad()
        fault.at("before")
        wide_square(model, member, step).backward()
        fault.at("committed")
        optimizer.step()
        found.append(flat(model))
    bagua.barrier()
    return {"member": member, "steps": found, "place": (bagua.get_world_size(), bagua.get_rank())}


def reference(members_of: list[list[int]], average: bool = True) -> list[torch.Tensor]:
    """Parameters after each step of one process that has the batches of these members."""
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    found = []
    for step, members in enumerate(members_of):
        optimizer.zero_grad()
        scale = len(members) if average else 1
        sum(wide_square(model, member, step) / scale for member in members).backward()
        optimizer.step()
        found.append(flat(model))
    return found


@dataclass(frozen=True)
class Kill:
    """See faults.py."""

    member: int
    step: int
    bucket: int
    phase: str

    def counts_from(self) -> list[int]:
        """The first step without the member: one of these."""
        return {"committed": [self.step + 1], "flags": [self.step, self.step + 1]}.get(self.phase, [self.step])


Reference = Callable[[list[list[int]], bool], list[torch.Tensor]]


def references(members: int, kills: list[Kill], average: bool, reference: Reference) -> list[list[torch.Tensor]]:
    """Parameters after each step, for all that may have happened."""
    found = []
    for firsts in itertools.product(*(kill.counts_from() for kill in kills)):
        gone = {kill.member: first for kill, first in zip(kills, firsts, strict=True)}
        by_step = [[m for m in range(members) if gone.get(m, STEPS) > step] for step in range(STEPS)]
        found.append(reference(by_step, average))
    return found


def check_survivors(ranks: Ranks, kills: list[Kill], average: bool = True, reference: Reference = reference) -> None:
    """All but those that were killed ended well, with the same bits, and those of a reference but for rounding."""
    killed = {kill.member for kill in kills}
    for one in ranks.started:
        if one.rank in killed:
            assert one.process.returncode == -9, one.output
    results = [one.result() for one in ranks.started if one.rank not in killed]
    for result in results[1:]:
        for mine, first in zip(result["steps"], results[0]["steps"], strict=True):
            assert torch.equal(mine, first)
    found = results[0]["steps"]
    wanted = references(len(ranks.started), kills, average, reference)
    assert any(
        all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(found, steps, strict=True))
        for steps in wanted
    ), [(one - other).abs().max() for one, other in zip(found, wanted[0], strict=True)]
    left = sorted({one.rank for one in ranks.started} - killed)
    for result in results:
        assert result["place"] == (len(left), left.index(result["member"]))


def rank_joins() -> None:
    bagua.init_process_group()
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    with pytest.raises(ConfigError, match="ElasticSampler"), bagua.join(model):
        pass


def test_uneven_numbers_of_batches_are_the_samplers_work(ranks: Ranks) -> None:
    ranks.start(rank_joins, nprocs=2, elastic=True)
    ranks.wait()
    assert [one.process.returncode for one in ranks.started] == [0, 0], [one.output for one in ranks.started]


JOBS = [
    [Kill(4, 1, 0, "before"), Kill(0, 2, 1, "bucket"), Kill(2, 3, 0, "submitted")],
    [Kill(0, 0, 0, "ready"), Kill(3, 2, 0, "flags"), Kill(1, 4, 0, "committed")],
    [Kill(2, 0, 0, "submitted"), Kill(0, 1, 0, "committed"), Kill(3, 3, 2, "bucket")],
    [Kill(1, 0, 1, "bucket"), Kill(2, 1, 0, "flags"), Kill(0, 3, 0, "ready")],
]


@pytest.mark.parametrize(
    "kills",
    [*JOBS[:3], pytest.param(JOBS[3], marks=pytest.mark.full)],
    ids=lambda kills: " ".join(k.phase for k in kills),
)
def test_the_others_go_on_when_ranks_are_killed(ranks: Ranks, kills: list[Kill]) -> None:
    """No step is lost or done twice: a step counts with all members, or again with those that are left."""
    told = " ".join(f"{kill.member}:{kill.step}:{kill.bucket}:{kill.phase}" for kill in kills)
    ranks.start(rank_train, nprocs=5, elastic=True, environment={VARIABLE: told, "BAGUA_DEFAULT_BUCKET_SIZE": "3000"})
    ranks.wait(90.0)
    check_survivors(ranks, kills)


@pytest.mark.parametrize("hosts", [[[0, 1, 2]], [[0, 1], [2]]], ids=str)
def test_a_step_that_others_have_committed_counts_here_too(ranks: Ranks, hosts: list[list[int]]) -> None:
    """Member 2 dies when all but member 1 have heard that the step is whole: member 1 hears it in the next
    generation, and goes on from there as they do. (The others would wait for it before, to compare replicas.)"""
    environment = {VARIABLE: "1:2:0:unheard 2:2:0:committed", "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    environment[replica_check.VARIABLE] = "off"
    ranks.start(rank_train, hosts=hosts, elastic=True, environment=environment)
    ranks.wait(60.0)
    check_survivors(ranks, [Kill(2, 2, 0, "committed")])


def rank_programs() -> dict[str, Any]:
    """A program whose calls are hit by losses: member 3 is killed before its second all-reduce, 2 before a broadcast,
    4 before an all-gather. Returns what it saw."""
    bagua.init_process_group()
    member = current().membership.member
    seen: dict[str, Any] = {"member": member, "changes": []}
    bagua.communication.on_membership_change(lambda change: seen["changes"].append(tuple(change)))
    pair = bagua.communication.new_group([0, 1])
    doomed = bagua.communication.new_group([1, 3])
    mine = torch.full((3,), 2.0**member)
    bagua.allreduce_inplace(mine)
    seen["all"] = mine.clone()
    if member == 3:
        kill_self()
    given = torch.full((3,), 2.0**member)
    got = torch.zeros(3)
    bagua.allreduce(given, got, bagua.ReduceOp.SUM)
    seen["without 3"] = got
    if member == 2:
        kill_self()
    told = torch.full((2, 2), float(member)).t()
    bagua.broadcast(told, 1)
    seen["broadcast"] = told.clone()
    if member == 4:
        kill_self()
    everyone = torch.zeros(bagua.get_world_size())
    try:
        bagua.allgather(torch.ones(1), everyone)
    except MembershipChanged as error:
        seen["all-gather"] = str(error)
    again = torch.zeros(bagua.get_world_size())
    bagua.allgather(torch.full((1,), float(member)), again)
    seen["again"] = again
    if member in (0, 1):
        both = torch.ones(1)
        bagua.allreduce_inplace(both, comm=pair.get_global_communicator())
        seen["pair"] = both.item()
    if member == 1:
        with pytest.raises(MembershipChanged, match="lost members: 3"):
            doomed.get_global_communicator()
    bagua.barrier()
    seen["environment"] = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    return seen


def test_all_reduce_and_broadcast_are_repeated_and_others_raise(ranks: Ranks) -> None:
    ranks.start(rank_programs, nprocs=6, elastic=True)
    ranks.wait(60.0)
    assert [one.process.returncode for one in ranks.started] == [0, 0, -9, -9, -9, 0], [
        one.output for one in ranks.started
    ]
    for place, result in enumerate([ranks.started[member].result() for member in (0, 1, 5)]):
        assert result["all"].tolist() == [63.0] * 3
        assert result["without 3"].tolist() == [63.0 - 8] * 3
        assert result["broadcast"].tolist() == [[1.0] * 2] * 2
        assert "allgather is not repeated by itself" in result["all-gather"]
        assert result["again"].tolist() == [0.0, 1.0, 5.0]
        assert result.get("pair", 2.0) == 2.0
        assert [change[2:] for change in result["changes"]] == [(5, 6), (4, 5), (3, 4)]
        assert result["environment"] == [str(place), "3", str(place), "3"]


def rank_broadcasts() -> list[float]:
    """Member 0, the root, is killed before it broadcasts."""
    bagua.init_process_group()
    member = current().membership.member
    bagua.barrier()
    if member == 0:
        kill_self()
    mine = torch.full((4,), float(member))
    bagua.broadcast(mine, 0)
    return mine.tolist()


def test_after_the_root_was_lost_the_rank_at_its_place_gives_what_it_has(ranks: Ranks) -> None:
    started = ranks.start(rank_broadcasts, 3, elastic=True)
    ranks.wait()
    assert [one.result() for one in started[1:]] == [[1.0] * 4] * 2


def rank_calls() -> dict[str, int]:
    """Trains; returns the functions of Python that a backward pass calls, the least of several passes, and buckets."""
    bagua.init_process_group()
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    found = []

    def count(_: object, event: str, __: object) -> None:
        found[-1] += event == "call"

    for step in range(8):
        optimizer.zero_grad()
        result = wide_square(model, bagua.get_rank(), step)
        found.append(0)
        sys.setprofile(count)
        try:
            result.backward()
        finally:
            sys.setprofile(None)
        optimizer.step()
    bagua.barrier()
    return {"calls": min(found[3:]), "buckets": len(model.bagua_buckets)}


COMMIT_CALLS, BUCKET_CALLS = 30, 8


def test_a_commit_makes_few_calls(ranks: Ranks) -> None:
    """They are what it costs: at the end of backward caches are full of gradients, and a call of Python takes 3 µs. The
    second number is what executions of an elastic job call for each bucket, mostly while others still compute."""
    found = []
    for kind in (True, False):
        found += ranks.run(rank_calls, 2, elastic=kind, environment={"BAGUA_DEFAULT_BUCKET_SIZE": "3000"})[:1]
        ranks.close()
    elastic, plain = found
    assert elastic["buckets"] == plain["buckets"] > 2
    assert elastic["calls"] - plain["calls"] <= COMMIT_CALLS + BUCKET_CALLS * plain["buckets"], (elastic, plain)


CALLS = 300


def rank_threads() -> dict[str, Any]:
    """Three threads communicate at once, each on a communicator of its own; member 3 is killed meanwhile."""
    bagua.init_process_group()
    member = current().membership.member
    left, doomed = bagua.communication.new_group([0, 1, 2]), bagua.communication.new_group([1, 3])
    seen: dict[str, Any] = {"all": [], "left": [], "doomed": ""}

    def add_up(name: str, comm: Any) -> None:
        for _ in range(CALLS):
            if name == "all" and member == 3 and len(seen[name]) == CALLS // 2:
                kill_self()
            total = torch.full((1,), member + 1.0)
            bagua.allreduce_inplace(total, comm=comm)
            seen[name].append(total.item())

    def be_told(comm: Any) -> None:
        try:
            while True:
                bagua.allreduce_inplace(torch.ones(1), comm=comm)
        except MembershipChanged as error:
            seen["doomed"] = str(error)

    threads = []
    if member != 3:
        threads.append(threading.Thread(target=add_up, args=("left", left.get_global_communicator())))
    if member in (1, 3):
        threads.append(threading.Thread(target=be_told, args=(doomed.get_global_communicator(),)))
    for thread in threads:
        thread.start()
    add_up("all", None)
    for thread in threads:
        thread.join()
    return seen


@pytest.mark.parametrize("hosts", [pytest.param([[0, 1, 2, 3]], marks=pytest.mark.full), [[0, 1], [2, 3]]], ids=str)
def test_threads_of_a_rank_go_on_beside_each_other(ranks: Ranks, hosts: list[list[int]]) -> None:
    """Each gets its result, or is told that its communicator has lost a member."""
    ranks.start(rank_threads, hosts=hosts, elastic=True)
    ranks.wait(60.0)
    for one in ranks.started[:3]:
        seen = one.result()
        assert seen["left"] == [6.0] * CALLS
        with_all = seen["all"].count(10.0)
        assert CALLS // 2 <= with_all <= CALLS // 2 + 1 and seen["all"][with_all:] == [6.0] * (CALLS - with_all)
        assert ("has lost members: 3" in seen["doomed"]) == (one.rank == 1)


def rank_entered_meanwhile() -> dict[str, Any]:
    """A thread adds up; its flags are over, and it has not looked. Meanwhile member 2 is killed, and the main thread of
    this rank enters the next generation. Member 1 hears only then that members have changed."""
    bagua.init_process_group()
    member = current().membership.member
    group = bagua.communication.new_group([0, 1, 2])
    found: list[float] = []

    def add_up() -> None:
        flags = units(current()).flags
        exchange = flags.exchange

        def exchange_and_wait(*arguments: Any, **named: Any) -> None:
            exchange(*arguments, **named)
            if member == 2:
                time.sleep(0.2)  # the others' are over, too
                kill_self()
            del flags.exchange
            while current().membership.generation == 1:
                time.sleep(0.001)
            if member == 1:
                raise Regrouped("The flags were over just before.")

        flags.exchange = exchange_and_wait  # type: ignore[method-assign]  # of this thread
        for _ in range(3):
            total = torch.full((1,), member + 1.0)
            bagua.allreduce_inplace(total)
            found.append(total.item())

    thread = threading.Thread(target=add_up)
    thread.start()
    if member != 2:
        with pytest.raises(MembershipChanged):
            bagua.allreduce_inplace(torch.ones(1), comm=group.get_global_communicator())
    thread.join()
    return {"found": found}


@pytest.mark.parametrize("hosts", [[[0, 1, 2]], [[0, 1], [2]]], ids=str)
def test_a_unit_told_as_open_is_not_committed_behind_it(ranks: Ranks, hosts: list[list[int]]) -> None:
    """Nobody has told that the first sum counts: both that are left repeat it, though one had heard its end."""
    ranks.start(rank_entered_meanwhile, hosts=hosts, elastic=True)
    ranks.wait(60.0)
    assert [one.result()["found"] for one in ranks.started[:2]] == [[3.0, 3.0, 3.0]] * 2


def rank_gathers_beside() -> list[str]:
    """The main thread is in the next generation, and waits for member 1, which computes, when another thread gathers.
    On member 0 it begins before all have heard of each other, and is told; nobody waits for ever."""
    bagua.init_process_group()
    session, member = current(), current().membership.member
    comm = bagua.communication.new_group([0, 1]).get_global_communicator() if member < 2 else None
    bagua.barrier()
    if member == 2:
        kill_self()
    told: list[str] = []

    def gather() -> None:
        while (session.membership.generation if member == 0 else session.connection.settled) == 1:
            time.sleep(0.001)
        found = torch.zeros(2)
        while not found[1]:
            try:
                bagua.allgather(torch.full((1,), float(member)), found, comm=comm)
            except MembershipChanged as error:
                told.append(str(error))

    thread = threading.Thread(target=gather)
    thread.start()
    if member == 1:
        time.sleep(0.5)
    bagua.allreduce_inplace(torch.ones(1))
    thread.join()
    return told


def test_a_primitive_beside_a_thread_that_enters(ranks: Ranks) -> None:
    ranks.start(rank_gathers_beside, hosts=[[0, 1, 2]], elastic=True)
    ranks.wait(60.0)
    told = ranks.started[0].result()
    assert len(told) == 1 and "allgather is not repeated by itself" in told[0]
    assert ranks.started[1].result() == []


def rank_models() -> dict[str, Any]:
    """Two models in one pass, accumulation under no_sync, gradients with memory of their own, a skipped step."""
    bagua.init_process_group()
    member = current().membership.member
    models = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    optimizers = [sgd(model) for model in models]
    wrap(models[0], optimizers[0])
    wrap(models[1], optimizers[1], average=False, do_flatten=False)
    fault = Fault(lambda: models[0].bagua_buckets)
    found = []
    for step in range(STEPS):
        fault.step = step
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        with models[0].bagua_ddp.no_sync(), models[1].bagua_ddp.no_sync():
            sum(wide_square(model, member, 10 * step) for model in models).backward()
        fault.at("before")
        sum(wide_square(model, member, 10 * step + 1) for model in models).backward()
        fault.at("committed")
        if step != 2:  # as a GradScaler skips it
            for optimizer in optimizers:
                optimizer.step()
        found.append(torch.cat([flat(model) for model in models]))
    bagua.barrier()
    return {"member": member, "steps": found, "place": (bagua.get_world_size(), bagua.get_rank())}


def reference_of_models(members_of: list[list[int]], _: bool = True) -> list[torch.Tensor]:
    """``reference`` for ``rank_models``."""
    models = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    optimizers = [sgd(model) for model in models]
    found = []
    for step, members in enumerate(members_of):
        for model, optimizer, scale in zip(models, optimizers, (len(members), 1), strict=True):
            optimizer.zero_grad()
            for member in members:
                for part in range(2):
                    (wide_square(model, member, 10 * step + part) / scale).backward()
            if step != 2:
                optimizer.step()
        found.append(torch.cat([flat(model) for model in models]))
    return found


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(
            [Kill(1, 1, 0, "before"), Kill(0, 2, 1, "bucket"), Kill(4, 3, 0, "ready")], marks=pytest.mark.full
        ),
        [Kill(0, 0, 0, "submitted"), Kill(2, 1, 0, "ready"), Kill(3, 4, 0, "submitted")],
    ],
    ids=lambda kills: " ".join(kill.phase for kill in kills),
)
def test_two_models_and_accumulation(ranks: Ranks, kills: list[Kill]) -> None:
    """Faults are those of the first model's pass: the second one's is exchanged with the members of that moment."""
    told = " ".join(f"{kill.member}:{kill.step}:{kill.bucket}:{kill.phase}" for kill in kills)
    ranks.start(rank_models, nprocs=5, elastic=True, environment={VARIABLE: told, "BAGUA_DEFAULT_BUCKET_SIZE": "3000"})
    ranks.wait(90.0)
    check_survivors(ranks, kills, reference=reference_of_models)


def rank_sums(folder: str) -> torch.Tensor:
    """Sums over two passes of a step, both exchanged. Rank 0 is killed between those of the second step, when the
    others have the first one's result."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer, average=False)
    for step in range(3):
        optimizer.zero_grad()
        wide_square(model, member, 2 * step).backward()
        Path(folder, f"{step}-{member}").touch()
        if step == 1 and member == 0:
            for other in (1, 2):
                await_file(Path(folder, f"1-{other}"))
            kill_self()
        wide_square(model, member, 2 * step + 1).backward()
        optimizer.step()
    return flat(model)


def test_a_sum_of_several_passes_whose_first_rank_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    """The result that all have counts once, whoever brings it."""
    ranks.start(rank_sums, nprocs=3, elastic=True, folder=str(tmp_path))
    ranks.wait(60.0)
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    for step, passes in enumerate(((range(3), range(3)), (range(3), (1, 2)), ((1, 2), (1, 2)))):
        optimizer.zero_grad()
        for part, members in enumerate(passes):
            for member in members:
                wide_square(model, member, 2 * step + part).backward()
        optimizer.step()
    for one in ranks.started[1:]:
        assert torch.allclose(one.result(), flat(model), rtol=0, atol=1e-12)


@pytest.mark.parametrize("phase", ["ready", "flags"])
def test_a_loss_while_models_are_wrapped(ranks: Ranks, phase: str) -> None:
    """Rank 0, whose state all take, is killed when it has sent it."""
    ranks.start(
        rank_train, nprocs=3, elastic=True, environment={VARIABLE: f"0:0:0:{phase}"}, wrapping=True, average=False
    )
    ranks.wait(60.0)
    check_survivors(ranks, [Kill(0, 0, 0, "ready")], average=False)


def rank_in_the_style_of_the_original(mode: str, folder: str) -> tuple[list[str], torch.Tensor]:
    """Trains with operations on registered tensors; member 3 is lost in the third step. Returns what the others were
    told, and their weights after an exchange in the end."""
    bagua.init_process_group()
    member = current().membership.member
    model, optimizer = start(Reified(DecentralizedImpl, mode, False))
    told: list[str] = []
    for step in range(6):
        bagua.barrier()
        if step == 2 and member == 3:
            for other in range(3):
                await_file(Path(folder, str(other)))
            kill_self()
        if step == 2:
            Path(folder, str(member)).touch()
        try:
            loss(model, member, step).backward()
        except MembershipChanged as error:
            told.append(str(error))
            if "operations of bucket" in told[-1]:
                model.with_bagua([optimizer], Reified(DecentralizedImpl, "all", False))
            continue
        optimizer.step()
    loss(model, member, 6).backward()
    return told, flat(model)


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_operations_on_registered_tensors_say_that_a_rank_was_lost(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """They are not repeated: whoever waits for the lost rank is told, at once. The next step works, or, where ranks
    have peers, says what is to be done."""
    ranks.start(rank_in_the_style_of_the_original, nprocs=4, elastic=True, mode=mode, folder=str(tmp_path))
    ranks.wait(60.0)
    results = [one.result() for one in ranks.started[:3]]
    told = [words for words, _ in results]
    lost = [words[0] for words in told if "are not repeated by themselves" in words[0]]
    assert all("rank 3" in words for words in lost)
    if mode == "all":
        assert len(lost) == 3 and [len(words) for words in told] == [1] * 3
    else:  # rank 1 was with rank 3 in this round
        assert told[1][0] in lost and all("operations of bucket 0" in words[-1] for words in told)
    assert all(torch.equal(weights, results[0][1]) for _, weights in results)


def rank_begins(folder: str, inside: bool) -> dict[str, Any]:
    """Members 0 and 1 die before and after they join, when 2 has begun: it is ``inside`` init_process_group, or has
    made its sampler. 3 comes later. Returns what it saw."""
    member = int(os.environ["RANK"])
    begun = Path(folder, "begun-2")

    def join_torch(*arguments: Any) -> Any:
        if member == 1:
            await_file(begun)
            kill_self()
        if inside and member == 2:
            begun.touch()
        return TorchGroup(*arguments)

    beginning.TorchGroup = join_torch  # type: ignore[assignment, misc]
    if member == 0:
        await_file(begun)
        kill_self()
    if member == 3:
        await_file(Path(folder, "regrouped-3"))
    bagua.init_process_group()
    samples = torch.randn(12, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sampler = bagua.contrib.ElasticSampler(TensorDataset(samples, torch.arange(12)), batch_size=3)
    if member == 2:
        begun.touch()
    mine = torch.full((5,), 2.0**member)
    bagua.allreduce_inplace(mine)
    seen: dict[str, Any] = {"place": (bagua.get_world_size(), bagua.get_rank()), "sum": mine[0].item(), "used": []}
    if connects_lazily():
        seen["torch"] = dist.get_world_size()
    model = seeded(wide_mlp, seed=member)
    optimizer = sgd(model)
    wrap(model, optimizer)
    for _ in sampler.epochs(1):
        for inputs, indices in sampler.loader():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            seen["used"] += indices.tolist()
    return {**seen, "model": flat(model)}


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 1, 2, 3]]], ids=["inside", "after"])
def test_losses_while_ranks_begin(ranks: Ranks, tmp_path: Path, hosts: list[list[int]]) -> None:
    """Those that are left go on, in whichever generation they came. On two hosts they wait for each other in
    init_process_group."""
    ranks.start(rank_begins, hosts=hosts, elastic=True, folder=str(tmp_path), inside=len(hosts) > 1)
    assert ranks.regrouper is not None
    ranks.regrouper.on_regroup = lambda generation: (tmp_path / f"regrouped-{generation}").touch()
    ranks.started[0].process.wait(60.0)
    ranks.regrouper.lose([0])  # as its daemon says, whose child it was
    ranks.wait(60.0)
    assert [one.process.returncode for one in ranks.started[:2]] == [-9, -9]
    found = [one.result() for one in ranks.started[2:]]
    assert [one["place"] for one in found] == [(2, 0), (2, 1)] and [one["sum"] for one in found] == [12, 12]
    assert all(one.get("torch", 2) == 2 for one in found)
    assert torch.equal(found[0]["model"], found[1]["model"])
    assert sorted(found[0]["used"] + found[1]["used"]) == list(range(12))
