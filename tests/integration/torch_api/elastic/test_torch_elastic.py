"""Elastic jobs: ranks are killed, and the others go on. Results are those of one process with the same members."""

import itertools
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compat_scenarios.decentralized import DecentralizedImpl
from compat_scenarios.support import Reified, loss, start
from rig.files import await_file
from rig.ranks.faults import VARIABLE, Fault, kill_self, start_beside
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from training_scenarios import sparse
from training_scenarios.support import (
    batch,
    mlp,
    seeded,
    sgd,
    shard,
    square,
    whole_parameters,
    wide_mlp,
    wide_square,
    wrap,
)

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.base import islands
from bagua.base.errors import ConfigError, MembershipChanged
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.data_parallel.distributed import DistributedDataParallel
from bagua.torch_api.job import start as beginning
from bagua.torch_api.job.connection import Regrouped
from bagua.torch_api.job.session import current
from bagua.torch_api.job.torch_distributed import TorchGroup, connects_lazily
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.sparse_gradients import SparseGradients

STEPS = 5
SMALL = {"BAGUA_DEFAULT_BUCKET_SIZE": "3000"}


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def begin():
    """The number of this member."""
    bagua.init_process_group()
    return current().membership.member


def rank_train(average=True, wrapping=False):
    """Trains; returns parameters after each step. ``wrapping``: step 0 of faults is ``with_bagua``."""
    member, model = begin(), seeded(wide_mlp)
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


def reference(members_of, average=True):
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

    def counts_from(self):
        """The first step without the member: one of these."""
        return {"committed": [self.step + 1], "flags": [self.step, self.step + 1]}.get(self.phase, [self.step])


def told(kills):
    return {VARIABLE: " ".join(f"{kill.member}:{kill.step}:{kill.bucket}:{kill.phase}" for kill in kills)} | SMALL


def names(kills):
    return " ".join(kill.phase for kill in kills)


def references(members, kills, average, reference):
    """Parameters after each step, for all that may have happened."""
    found = []
    for firsts in itertools.product(*(kill.counts_from() for kill in kills)):
        gone = {kill.member: first for kill, first in zip(kills, firsts, strict=True)}
        by_step = [[m for m in range(members) if gone.get(m, STEPS) > step] for step in range(STEPS)]
        found.append(reference(by_step, average))
    return found


def check_survivors(ranks, kills, average=True, reference=reference):
    """All but those that were killed ended well, with the same bits, and those of a reference but for rounding."""
    killed = {kill.member for kill in kills}
    results = ranks.left(killed)
    for result in results[1:]:
        assert all(map(torch.equal, result["steps"], results[0]["steps"]))
    found = results[0]["steps"]
    wanted = references(len(ranks.started), kills, average, reference)
    assert any(
        all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in zip(found, steps, strict=True))
        for steps in wanted
    ), [(one - other).abs().max() for one, other in zip(found, wanted[0], strict=True)]
    left = sorted({one.rank for one in ranks.started} - killed)
    for result in results:
        assert result["place"] == (len(left), left.index(result["member"]))


JOBS = [
    [Kill(4, 1, 0, "before"), Kill(0, 2, 1, "bucket"), Kill(2, 3, 0, "submitted")],
    [Kill(0, 0, 0, "ready"), Kill(3, 2, 0, "flags"), Kill(1, 4, 0, "committed")],
    [Kill(2, 0, 0, "submitted"), Kill(0, 1, 0, "committed"), Kill(3, 3, 2, "bucket")],
    [Kill(1, 0, 1, "bucket"), Kill(2, 1, 0, "flags"), Kill(0, 3, 0, "ready")],
]


@pytest.mark.parametrize(
    "kills", [*JOBS[:2], *(pytest.param(job, marks=pytest.mark.full) for job in JOBS[2:])], ids=names
)
def test_the_others_go_on_when_ranks_are_killed(ranks, kills):
    """No step is lost or done twice: a step counts with all members, or again with those that are left."""
    ranks.start(rank_train, nprocs=5, elastic=True, environment=told(kills))
    check_survivors(ranks, kills)


def rank_programs():
    """A program whose calls are hit by losses: member 3 is killed before its second all-reduce, 2, the root, before a
    broadcast, 4 before an all-gather. Returns what it saw."""
    member = begin()
    seen = {"member": member, "changes": []}
    bagua.communication.on_membership_change(lambda change: seen["changes"].append(tuple(change)))
    pair, doomed = bagua.communication.new_group([0, 1]), bagua.communication.new_group([1, 3])
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    with pytest.raises(ConfigError, match="ElasticSampler"), bagua.join(model):
        pass
    seen["all"] = torch.full((3,), 2.0**member)
    bagua.allreduce_inplace(seen["all"])
    if member == 3:
        kill_self()
    seen["without 3"] = torch.zeros(3)
    bagua.allreduce(torch.full((3,), 2.0**member), seen["without 3"], bagua.ReduceOp.SUM)
    if member == 2:
        kill_self()
    seen["broadcast"] = torch.full((2, 2), float(member)).t()
    bagua.broadcast(seen["broadcast"], 2)
    if member == 4:
        kill_self()
    with pytest.raises(MembershipChanged, match="allgather is not repeated by itself"):
        bagua.allgather(torch.ones(1), torch.zeros(bagua.get_world_size()))
    seen["again"] = torch.zeros(bagua.get_world_size())
    bagua.allgather(torch.full((1,), float(member)), seen["again"])
    if member in (0, 1):
        both = torch.ones(1)
        bagua.allreduce_inplace(both, comm=pair.get_global_communicator())
        assert both.item() == 2.0
    if member == 1:
        with pytest.raises(MembershipChanged, match="lost members: 3"):
            doomed.get_global_communicator()
    bagua.barrier()
    seen["environment"] = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    return seen


def test_all_reduce_and_broadcast_are_repeated_and_others_raise(ranks):
    """When the root was lost, the rank at its place gives what it has. Uneven numbers of batches are refused: they are
    the sampler's work."""
    for place, result in enumerate(ranks.survive(rank_programs, (2, 3, 4), 6)):
        assert result["all"].tolist() == [63.0] * 3
        assert result["without 3"].tolist() == [63.0 - 8] * 3
        assert result["broadcast"].tolist() == [[4.0] * 2] * 2
        assert result["again"].tolist() == [0.0, 1.0, 5.0]
        assert [change[2:] for change in result["changes"]] == [(5, 6), (4, 5), (3, 4)]
        assert result["environment"] == [str(place), "3", str(place), "3"]


CALLS = 300


def rank_threads():
    """Three threads communicate at once, each on a communicator of its own; member 3 is killed meanwhile."""
    member = begin()
    left, doomed = bagua.communication.new_group([0, 1, 2]), bagua.communication.new_group([1, 3])
    seen = {"all": [], "left": [], "doomed": ""}

    def add_up(name, comm):
        for _ in range(CALLS):
            if name == "all" and member == 3 and len(seen[name]) == CALLS // 2:
                kill_self()
            total = torch.full((1,), member + 1.0)
            bagua.allreduce_inplace(total, comm=comm)
            seen[name].append(total.item())

    def be_told(comm):
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


def test_threads_of_a_rank_go_on_beside_each_other(ranks):
    for rank, seen in enumerate(ranks.survive(rank_threads, (3,), hosts=[[0, 1], [2, 3]])):
        assert seen["left"] == [6.0] * CALLS
        with_all = seen["all"].count(10.0)
        assert CALLS // 2 <= with_all <= CALLS // 2 + 1 and seen["all"][with_all:] == [6.0] * (CALLS - with_all)
        assert ("has lost members: 3" in seen["doomed"]) == (rank == 1)


def rank_entered_meanwhile():
    """A thread adds up; its flags are over, and it has not looked. Meanwhile member 2 is killed, and the main thread of
    this rank enters the next generation. Member 1 hears only then that members have changed."""
    member = begin()
    group = bagua.communication.new_group([0, 1, 2])
    found = []

    def add_up():
        flags = units(current()).flags
        exchange = flags.exchange

        def exchange_and_wait(*arguments, **named):
            exchange(*arguments, **named)
            if member == 2:
                time.sleep(0.2)  # the others' are over, too
                kill_self()
            del flags.exchange
            while current().membership.generation == 1:
                time.sleep(0.001)
            if member == 1:
                raise Regrouped("The flags were over just before.")

        flags.exchange = exchange_and_wait  # of this thread
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
    return found


def test_a_unit_told_as_open_is_not_committed_behind_it(ranks):
    """Nobody has told that the first sum counts: both that are left repeat it, though one had heard its end."""
    assert ranks.survive(rank_entered_meanwhile, (2,), hosts=[[0, 1], [2]]) == [[3.0, 3.0, 3.0]] * 2


def rank_gathers_beside():
    """The main thread is in the next generation, and waits for member 1, which computes, when another thread gathers.
    On member 0 it begins before all have heard of each other, and is told; nobody waits for ever."""
    member, session = begin(), current()
    comm = bagua.communication.new_group([0, 1]).get_global_communicator() if member < 2 else None
    bagua.barrier()
    if member == 2:
        kill_self()
    told = []

    def gather():
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


def test_a_primitive_beside_a_thread_that_enters(ranks):
    told, others = ranks.survive(rank_gathers_beside, (2,), 3)
    assert len(told) == 1 and "allgather is not repeated by itself" in told[0] and others == []


def rank_models():
    """Two models in one pass, accumulation under no_sync, gradients with memory of their own, a skipped step."""
    member = begin()
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


def reference_of_models(members_of, _=True):
    """``reference`` for ``rank_models``."""
    models = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    optimizers = [sgd(model) for model in models]
    found = []
    for step, members in enumerate(members_of):
        for model, optimizer, scale in zip(models, optimizers, (len(members), 1), strict=True):
            optimizer.zero_grad()
            for member, part in itertools.product(members, range(2)):
                (wide_square(model, member, 10 * step + part) / scale).backward()
            if step != 2:
                optimizer.step()
        found.append(torch.cat([flat(model) for model in models]))
    return found


MODELS = [
    [Kill(0, 0, 0, "submitted"), Kill(2, 1, 0, "ready"), Kill(3, 4, 0, "submitted")],
    [Kill(1, 1, 0, "before"), Kill(0, 2, 1, "bucket"), Kill(4, 3, 0, "ready")],
]


@pytest.mark.parametrize("kills", [MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.full)], ids=names)
def test_two_models_and_accumulation(ranks, kills):
    """Faults are those of the first model's pass: the second one's is exchanged with the members of that moment."""
    ranks.start(rank_models, nprocs=5, elastic=True, environment=told(kills))
    check_survivors(ranks, kills, reference=reference_of_models)


def rank_sums(folder):
    """Sums over two passes of a step, both exchanged. Rank 0 is killed between those of the second step, when the
    others have the first one's result."""
    member, model = begin(), seeded(wide_mlp)
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


def test_a_sum_of_several_passes_whose_first_rank_is_lost(ranks, tmp_path):
    """The result that all have counts once, whoever brings it."""
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    for step, passes in enumerate(((range(3), range(3)), (range(3), (1, 2)), ((1, 2), (1, 2)))):
        optimizer.zero_grad()
        for part, members in enumerate(passes):
            for member in members:
                wide_square(model, member, 2 * step + part).backward()
        optimizer.step()
    for found in ranks.survive(rank_sums, (0,), 3, folder=str(tmp_path)):
        assert torch.allclose(found, flat(model), rtol=0, atol=1e-12)


def rank_stages(inside):
    """Rank 0 is killed in a later pass of a step. ``inside``: the others have staged a gradient, and no more; otherwise
    before theirs begins. A thread of theirs enters the next generation then."""
    member = begin()
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 2000)).double())
    wrap(model, sgd(model), average=False)
    beside = start_beside()
    last = False

    def lose():
        if member == 0:
            kill_self()
        while current().connection.settled == 1:
            time.sleep(0.001)

    def rest(_):
        if last and inside:
            lose()

    # Behind the gradients of the last layer. A hook of its parameters would hold them back.
    model[1].register_forward_hook(lambda _, __, hidden: hidden.register_hook(rest) and None)
    for step in range(4):
        last = step == 3
        if last and not inside:
            lose()
        part_of(model, member, step).backward()
    beside.join()
    return [parameter.grad for parameter in model.parameters()]


def part_of(model, member, step):
    generator = torch.Generator().manual_seed(10 * step + member)
    return model(torch.randn(4, 10, generator=generator, dtype=torch.float64)).square().mean()


@pytest.mark.parametrize("inside", [True, False])
def test_staged_gradients_of_a_sum_whose_first_rank_is_lost(ranks, inside):
    """Another rank brings what all hold from earlier passes."""
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 2000)).double())
    for step, members in enumerate((range(3), range(3), range(3), (1, 2))):
        for member in members:
            part_of(model, member, step).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for found in ranks.survive(rank_stages, (0,), 3, inside=inside):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class OtherOrder(nn.Module):
    """Layers of one shape, which are used in another order than they are registered."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False).double() for _ in range(3))

    def forward(self, inputs):
        for layer in (0, 2, 1):
            inputs = torch.tanh(self.layers[layer](inputs))
        return inputs


def rank_reorders(folder):
    """In the first pass rank 0 has put its buckets into the order of gradients, and rank 1 has not, when rank 2 is
    killed."""
    member, model = begin(), seeded(OtherOrder)
    wrap(model, sgd(model))
    own = ModelBuckets._of_rank_0

    def told(layout, numbers):
        found, ModelBuckets._of_rank_0 = own(layout, numbers), own
        if member == 0:
            Path(folder, "told").touch()
            return found
        await_file(Path(folder, "told"))
        if member == 2:
            kill_self()
        raise Regrouped("a member was lost")

    ModelBuckets._of_rank_0 = told
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(member), dtype=torch.float64)
    model(inputs).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_loss_while_buckets_get_the_order_of_gradients(ranks, tmp_path):
    model = seeded(OtherOrder)
    for member in range(2):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(member), dtype=torch.float64)
        (model(inputs).square().mean() / 2).backward()
    for found in ranks.survive(rank_reorders, (2,), 3, folder=str(tmp_path)):
        torch.testing.assert_close(found, [one.grad for one in model.parameters()], rtol=0, atol=1e-12)


class BeginsAnew(GradientAllReduceAlgorithmImpl):
    def follow_members(self, bagua_ddp):
        return False


def rank_begins_anew():
    """Rank 2 is lost in the first of two passes that a step exchanges. Whether the model has other buckets after the
    next forward pass."""
    member, model = begin(), seeded(mlp)
    model.with_bagua([sgd(model)], Reified(BeginsAnew))
    square(model, member, 0).backward()
    first = model.bagua_buckets[0]
    outputs = model(batch(member, 1, 6, 10))
    if member == 2:
        kill_self()
    for loss_of_pass in (outputs.square().mean(), outputs.mean()):
        loss_of_pass.backward(retain_graph=True)
    square(model, member, 2).backward()
    return model.bagua_buckets[0] is not first


def test_an_algorithm_that_begins_anew_after_several_passes(ranks):
    assert ranks.survive(rank_begins_anew, (2,), 3) == [True, True]


def rank_has_buffers():
    """A buffer that all ranks have alike, after each forward pass. Rank 0 is killed before it first sends its own."""
    member, layers = begin(), seeded(mlp)
    layers.register_buffer("mask", torch.ones(3))
    model = DistributedDataParallel(layers, optimizers=[sgd(layers)])
    found = []
    if member == 0:
        kill_self()
    for step in range(2):
        square(model, member, step).backward()
        found.append(layers.mask.tolist())
    return found


def test_buffers_after_the_first_rank_is_lost(ranks):
    assert ranks.survive(rank_has_buffers, (0,), 3) == [[[1.0] * 3] * 2] * 2


@pytest.mark.parametrize("phase", ["ready", "flags"])
def test_a_loss_while_models_are_wrapped(ranks, phase):
    """Rank 0, whose state all take, is killed when it has sent it."""
    environment = {VARIABLE: f"0:0:0:{phase}"}
    ranks.start(rank_train, nprocs=3, elastic=True, environment=environment, wrapping=True, average=False)
    check_survivors(ranks, [Kill(0, 0, 0, "ready")], average=False)


def rank_wraps_two(sharded):
    """The second model communicates apart from the first, in which a rank was lost while it was wrapped."""
    member, models = begin(), [seeded(wide_mlp), seeded(wide_mlp)]
    algorithm = GradientAllReduceAlgorithm() if sharded else AsyncModelAverageAlgorithm()
    fault = Fault(list)
    fault.step = 0
    optimizers = []
    for model in models:
        if sharded:
            shard(model)
        optimizers.append(sgd(model))
        model.with_bagua([optimizers[-1]], algorithm)
    for model, optimizer in zip(reversed(models), reversed(optimizers), strict=True):
        if not sharded:  # ranks average at moments of their own
            model.bagua_algorithm.abort(model)
        wide_square(model, member, 0).backward()
        optimizer.step()
    numbers = [number for model in models for number in model.bagua_ddp._runner.numbers]
    return numbers, [[one.tolist() for one in whole_parameters(model)] for model in models]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loss_while_the_first_of_two_models_is_wrapped(ranks, sharded):
    """Communicators that ranks made for it before the loss, and after, have numbers of their own."""
    environment = {VARIABLE: "3:0:0:ready", islands.VARIABLE: str(1 + sharded)}
    ranks.start(rank_wraps_two, nprocs=6, elastic=True, environment=environment, sharded=sharded)
    for numbers, (first, second) in ranks.left((2, 3) if sharded else (3,)):
        assert len(set(numbers)) == len(numbers) == 4 and first == second


def rank_averages(name, **options):
    """Exchanges weights with one peer, or in the ring of hosts."""
    member, model = begin(), seeded(mlp)
    optimizer = sgd(model)
    fault = Fault(lambda: model.bagua_buckets)
    model.with_bagua([optimizer], Algorithm.init(name, **options))
    for step in range(STEPS):
        fault.step = step
        optimizer.zero_grad()
        square(model, member, step).backward()
        optimizer.step()
    return bagua.get_world_size()


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"name": "low_precision_decentralized"},
        {"name": "decentralized", "peer_selection_mode": "shift_one", "codec": "minmax8"},
    ],
    ids=lambda options: options["name"],
)
def test_a_loss_as_communicators_of_hosts_are_made(ranks, options, step):
    """A rank is lost when some have made them and others have not. The exchange is left out, and the next one works."""
    environment = {VARIABLE: f"3:{step}:0:ready"}
    assert ranks.survive(rank_averages, (3,), hosts=[[0, 1], [2, 3]], environment=environment, **options) == [3] * 3


def rank_in_the_style_of_the_original(mode, folder):
    """Trains with operations on registered tensors; member 3 is lost in the third step. Returns what the others were
    told, and their weights after an exchange in the end."""
    member = begin()
    model, optimizer = start(Reified(DecentralizedImpl, mode, False))
    told = []
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
def test_operations_on_registered_tensors_say_that_a_rank_was_lost(ranks, tmp_path, mode):
    """They are not repeated: whoever waits for the lost rank is told, at once. The next step works, or, where ranks
    have peers, says what is to be done."""
    results = ranks.survive(rank_in_the_style_of_the_original, (3,), 4, mode=mode, folder=str(tmp_path))
    told = [words for words, _ in results]
    lost = [words[0] for words in told if "are not repeated by themselves" in words[0]]
    assert all("rank 3" in words for words in lost)
    if mode == "all":
        assert len(lost) == 3 and [len(words) for words in told] == [1] * 3
    else:  # rank 1 was with rank 3 in this round
        assert told[1][0] in lost and all("operations of bucket 0" in words[-1] for words in told)
    assert all(torch.equal(weights, results[0][1]) for _, weights in results)


def rank_begins(folder, inside):
    """Members 0 and 1 die before and after they join, when 2 has begun: it is ``inside`` init_process_group, or has
    made its sampler. 3 comes later. Returns what it saw."""
    member = int(os.environ["RANK"])
    begun = Path(folder, "begun-2")

    def join_torch(*arguments):
        if member == 1:
            await_file(begun)
            kill_self()
        if inside and member == 2:
            begun.touch()
        return TorchGroup(*arguments)

    beginning.TorchGroup = join_torch
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
    seen = {"place": (bagua.get_world_size(), bagua.get_rank()), "sum": mine[0].item(), "used": []}
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
def test_losses_while_ranks_begin(ranks, tmp_path, hosts):
    """Those that are left go on, in whichever generation they came. On two hosts they wait for each other in
    init_process_group."""
    ranks.start(rank_begins, hosts=hosts, elastic=True, folder=str(tmp_path), inside=len(hosts) > 1)
    ranks.regrouper.on_regroup = lambda generation: (tmp_path / f"regrouped-{generation}").touch()
    ranks.started[0].process.wait(60.0)
    ranks.regrouper.lose([0])  # as its daemon says, whose child it was
    found = ranks.left((0, 1))
    assert [one["place"] for one in found] == [(2, 0), (2, 1)] and [one["sum"] for one in found] == [12, 12]
    assert all(one.get("torch", 2) == 2 for one in found)
    assert torch.equal(found[0]["model"], found[1]["model"])
    assert sorted(found[0]["used"] + found[1]["used"]) == list(range(12))


def rank_has_sparse_gradients(moment, bare):
    """Parameters after each step. Member 1 is killed in the third one: "before" its sparse gradients are exchanged,
    when the buckets have been, or "behind"."""
    member, model = begin(), seeded(lambda: sparse.Tables(bare=bare))
    optimizer = sparse.sgd(model)
    wrap(model, optimizer)
    results_of, step, found = SparseGradients._means, 0, []

    def results(self):
        if (moment, member, step) == ("before", 1, 2):
            kill_self()
        whole = results_of(self)
        if (moment, member, step) == ("behind", 1, 2):
            kill_self()
        return whole

    SparseGradients._means = results
    for step in range(STEPS):
        optimizer.zero_grad()
        if not bare:
            model(member, step).backward()
        (model.first(torch.tensor([step, member])).sum() * 0.1).backward()
        optimizer.step()
        found.append(flat(model))
    bagua.barrier()
    return found


@pytest.mark.parametrize(("moment", "bare"), [("before", False), ("behind", False), ("behind", True)])
def test_sparse_gradients(ranks, moment, bare):
    first, other = ranks.survive(rank_has_sparse_gradients, (1,), 3, moment=moment, bare=bare)
    assert len(first) == STEPS and all(map(torch.equal, first, other))
    assert not any(torch.equal(one, then) for one, then in itertools.pairwise(first))


BREAK_AT, LOOK_AT, WHOLE = 4, 12, 16


def rank_has_links(folder, broken, sharded):
    """Trains in float32; returns the parameters after each step. ``broken``: the first rank says when, and waits at a
    later step until it is done."""
    member, model = begin(), seeded(mlp)
    if sharded:
        shard(model)
    optimizer = sgd(model)
    wrap(model, optimizer)
    found = []
    for step in range(WHOLE):
        if broken and member == 0 and step == BREAK_AT:
            Path(folder, "now").touch()
        if broken and member == 0 and step == LOOK_AT:
            await_file(Path(folder, "done"))
        optimizer.zero_grad()
        square(model, member, step).backward()
        optimizer.step()
        found.append(torch.cat([one.flatten() for one in whole_parameters(model)]))
    bagua.barrier()
    return found, current().membership.generation


@pytest.mark.parametrize(("hosts", "size"), [([[0, 1], [2]], 1), ([[0, 1], [2, 3]], 2)])
def test_a_broken_link_leaves_the_same_bits(ranks, tmp_path, hosts, size):
    """The same members go on."""
    results = []
    for broken in (False, True):
        arguments = {"folder": str(tmp_path), "broken": broken, "sharded": size > 1}
        environment = {islands.VARIABLE: str(size)}
        ranks.start(rank_has_links, hosts=hosts, elastic=True, environment=environment, **arguments)
        if broken:
            await_file(tmp_path / "now")
            ranks.regrouper.again()
            (tmp_path / "done").touch()
        results += ranks.left()
        ranks.close()
    assert [generation for _, generation in results] == [1] * sum(map(len, hosts)) + [2] * sum(map(len, hosts))
    for step in range(WHOLE):
        assert len({found[step].numpy().tobytes() for found, _ in results}) == 1, f"step {step}"


def rank_opens_a_checkpointer(folder):
    """Rank 2 is killed while the others make theirs."""
    member, model = begin(), seeded(mlp)
    wrap(model, sgd(model))
    if member == 2:
        kill_self()
    bagua.checkpoint.Checkpointer(folder, every=5)
    return True


def test_a_loss_while_a_checkpointer_is_made(ranks, tmp_path):
    """Rank 0 has locked the folder already when it is made once more."""
    assert ranks.survive(rank_opens_a_checkpointer, (2,), 3, folder=str(tmp_path)) == [True, True]
