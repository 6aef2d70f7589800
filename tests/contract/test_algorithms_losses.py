"""Every algorithm when ranks are killed in the middle of a step (between steps: test_algorithms_joins.py).

First, a step that was cut off and repeated gives the bits of one that was not. In one job, all losses come between
steps: nothing is repeated. In another one, of each algorithm, the same ranks are killed at the same steps, but in the
middle of an exchange: before a bucket starts, before anything is waited for, and when results are whole and not
committed yet. Whoever is left must hold the same bits after each step. Asynchronous averages have no such steps: there
replicas must stay near each other.

Second, a member dies when an exchange counts, and another one that is left has not heard that: it must come to the same
bits as where it has heard it.
"""

from functools import partial

import pytest
import torch
from contract.algorithms.case import flat, mlp, square
from contract.algorithms.harness import selected
from contract.algorithms.rank_side import compare_replicas
from contract.algorithms.subjects import Subject, subject_of
from rig.ranks.engine_hosts import make_ranks
from rig.ranks.faults import VARIABLE, Fault
from rig.ranks.placing import placed

import bagua.torch_api as bagua
from bagua import algorithms
from bagua.torch_api.job.session import current

HOSTS = [[0, 1, 2], [3, 4]]
LEFT = (2, 3)
STEPS = 10
KILLS = {1: (3, "start"), 4: (5, "submitted"), 0: (7, "ready")}
"""Of each member that is killed: step and phase. Those that are left are on two hosts."""
MID_STEP = {member: phase for member, (_, phase) in KILLS.items()}


EXACT = {
    subject.name: subject
    for subject in (
        *map(subject_of, ("gradient_allreduce", "bytegrad", "qadam", "one_bit_adam", "zero_one_adam", "local_sgd")),
        *map(subject_of, ("no_loco", "decentralized", "low_precision_decentralized", "streaming_diloco")),
        Subject("gradient_allreduce sum", partial(algorithms.GradientAllReduceAlgorithm, average=False)),
        Subject("gradient_allreduce onebit", partial(algorithms.GradientAllReduceAlgorithm, codec="onebit")),
        Subject(
            "gradient_allreduce int4 everywhere",
            partial(algorithms.GradientAllReduceAlgorithm, codec="int4", everywhere=True),
        ),
        Subject("top_k", partial(algorithms.TopKAlgorithm, density=0.1, warmup_steps=2)),
        Subject("power_sgd", partial(algorithms.PowerSGDAlgorithm, rank=1)),
        Subject("local_sgd int4", partial(algorithms.LocalSGDAlgorithm, interval=2, codec="int4")),
        Subject("diloco int4", partial(algorithms.DiLoCoAlgorithm, interval=2, codec="int4", warmup_steps=2)),
        Subject("decentralized int4", partial(algorithms.DecentralizedAlgorithm, codec="int4")),
    )
}
OFTEN = {"gradient_allreduce onebit", "zero_one_adam", "low_precision_decentralized", "streaming_diloco"}
"""Those that are compared without --full: state of the engine's codec, of an optimizer, copies of
neighbours, an outer optimizer."""

ASYNCHRONOUS = {
    subject.name: subject
    for subject in (
        Subject("async", partial(algorithms.AsyncModelAverageAlgorithm, sync_interval_ms=0)),
        Subject("async int4", partial(algorithms.AsyncModelAverageAlgorithm, sync_interval_ms=0, codec="int4")),
    )
}


def rank_train(names, steps=STEPS):
    """Trains a model with each of these algorithms, all of them in each step. Returns their parameters after each."""
    bagua.init_process_group()
    compare_replicas()
    member = current().membership.member
    models = {}
    for name in names:
        subject = {**EXACT, **ASYNCHRONOUS}[name]
        torch.manual_seed(0)
        model = placed(mlp())
        optimizers = subject.optimizers(model)
        models[name] = model.with_bagua(optimizers, subject.make()), optimizers
    fault = Fault(lambda: [])
    found = {name: [] for name in names}
    for step in range(steps):
        bagua.barrier()
        fault.step = step
        fault.at("between")
        bagua.barrier()
        for name, (model, optimizers) in models.items():
            for optimizer in optimizers:
                optimizer.zero_grad()
            square(model, member, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            found[name].append(flat(model))
    bagua.barrier()
    return found


def train(folder, names, phases, variables=None):
    """Results of the ranks that are left. ``phases``: in which each of the others is killed."""
    kills = " ".join(f"{member}:{step}:0:{phases[member]}" for member, (step, _) in KILLS.items())
    with make_ranks(folder) as ranks:
        environment = {VARIABLE: kills, "BAGUA_DEFAULT_BUCKET_SIZE": "3000", **(variables or {})}
        ranks.start(rank_train, hosts=HOSTS, elastic=True, environment=environment, names=names)
        ranks.wait(150.0 + 4.0 * len(names))
        for one in ranks.started:
            assert one.process.returncode == (0 if one.rank in LEFT else -9), f"{one.rank}: {one.output}"
        return [ranks.started[member].result() for member in LEFT]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory, request):
    """Of all algorithms that are tested, with losses between steps."""
    names = selected(request, "test_a_repeated_step_gives_the_same_bits")
    return train(tmp_path_factory.mktemp("uncut"), names, dict.fromkeys(KILLS, "between"))


def check_same_bits(found, wanted, name):
    """Parameters of this algorithm are the same after each step, on each rank."""
    for mine, others in zip(found, wanted, strict=True):
        equal = [torch.equal(one, other) for one, other in zip(mine[name], others[name], strict=True)]
        assert all(equal), equal


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in EXACT]
)
def test_a_repeated_step_gives_the_same_bits(uncut, tmp_path, name):
    found = train(tmp_path, [name], MID_STEP)
    check_same_bits(found, uncut, name)


def check_near(found, name):
    """Asynchronous replicas are finite, and near each other at the end."""
    assert all(bool(parameters.isfinite().all()) for one in found for parameters in one[name])
    assert (found[0][name][-1] - found[1][name][-1]).abs().max() < 0.5


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "async" else pytest.mark.full) for name in ASYNCHRONOUS]
)
def test_asynchronous_replicas_stay_near_each_other(tmp_path, name):
    check_near(train(tmp_path, [name], MID_STEP), name)


OFTEN_UNHEARD = {"qadam"}


def train_unheard(folder, name, kills):
    """Parameters after each step of the members that are left: all but member 1."""
    folder.mkdir()
    with make_ranks(folder) as ranks:
        environment = {VARIABLE: kills, "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
        ranks.start(rank_train, hosts=HOSTS, elastic=True, environment=environment, names=[name], steps=6)
        ranks.wait(150.0)
        assert ranks.started[1].process.returncode == -9, ranks.started[1].output
        return [one.result() for one in ranks.started if one.rank != 1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN_UNHEARD else pytest.mark.full) for name in EXACT]
)
def test_an_exchange_that_others_have_committed_counts_here_too(tmp_path, name):
    heard = train_unheard(tmp_path / "heard", name, "1:2:0:heard")
    unheard = train_unheard(tmp_path / "unheard", name, "1:2:0:heard 3:2:0:unheard")
    check_same_bits(unheard, heard, name)
