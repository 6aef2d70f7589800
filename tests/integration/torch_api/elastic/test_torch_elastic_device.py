"""Elastic jobs with models on GPUs, without a GPU: CPU tensors count as a device's, over the fakes of
tests/native/leg."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from rig.ranks import fake_device, placing
from rig.ranks.faults import VARIABLE, kill_self

sys.path.insert(0, str(Path(__file__).parent))

import test_torch_elastic as losses
import test_torch_elastic_async as averages
import test_torch_joins as joins
from training_scenarios.support import seeded, sgd, wide_mlp, wide_square, wrap

import bagua.torch_api as bagua
from bagua.base import replica_check
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.session import current

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the fakes"
)
STEPS = 5
CONNECTS = {"FAKE_NCCL_CONNECTS": "1"}


# Without --full, the route of most jobs; the contract suite has the others without losses.
@pytest.mark.parametrize(
    "kills", [losses.JOBS[0], pytest.param(losses.JOBS[1], marks=pytest.mark.full)], ids=losses.names
)
@pytest.mark.parametrize(
    ("route", "hosts", "more"),
    [
        ("flat", [[0, 1, 2], [3, 4]], {}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("staged", [[0, 1, 2, 3, 4]], {}),
                ("", [[0, 1, 2], [3, 4]], {}),
                # Survivors are inside NCCL, which connects with the lost one, or in operations that wait for it.
                ("flat", [[0, 1, 2], [3, 4]], {**CONNECTS, "BAGUA_NCCL_BLOCKING": "1"}),
                ("flat", [[0, 1, 2], [3, 4]], {**CONNECTS, "BAGUA_NCCL_BLOCKING": "0"}),
            )
        ),
    ],
)
def test_the_others_go_on_when_ranks_are_killed(ranks, route, hosts, more, kills):
    """As on the CPU: a step counts with all members, or again with those that are left."""
    environment = placing.environment("fake", route) | losses.told(kills) | more
    ranks.start(losses.rank_train, hosts=hosts, elastic=True, environment=environment)
    losses.check_survivors(ranks, kills)


@pytest.mark.parametrize("route", ["staged", pytest.param("flat", marks=pytest.mark.full)])
def test_newcomers_rest_while_a_step_is_repeated(ranks, tmp_path, route):
    """They come with a loss in the middle of a step: communicators are made for the step without them, and again, in
    the same generation, with them."""
    environment = placing.environment("fake", route)
    joins.start(ranks, tmp_path, [[0, 1, 2]], {"3": "ready"}, environment=environment | {VARIABLE: "2:4:0:submitted"})
    ranks.regrouper.plans, ranks.regrouper.on_ready = False, (tmp_path / "ready").touch
    joins.join(ranks, tmp_path, [3, 4], 2, 1, environment=environment)  # each rank has a GPU of its own
    results = ranks.left((2,))
    joins.check_equal(results)
    assert [[step for step, *_ in result["steps"]][:2] for result in results] == [[1, 2]] * 2 + [[5, 6]] * 2


def rank_counts_waits():
    """Waits of the host in some steps, NCCL's aborts when a rank was lost, and what CUDA does not allow."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    runtime = fake_device.RUNTIME
    [device] = devices(current()).all()
    aborts = before = 0
    for step in range(2 * STEPS):
        if step == 1:  # others may be in the step before when the loss comes
            leg = device._leg
        if step == 2 and member == 2:
            kill_self()
        if step == STEPS:
            assert bagua.get_world_size() == 2 or not current().elastic
            aborts = leg.counters()["aborts"]
            runtime.watch_this_thread()
            before = runtime.synchronisations()
        optimizer.zero_grad()
        wide_square(model, member, step).backward()
        optimizer.step()
    return runtime.synchronisations() - before, aborts, runtime.misuse()


@pytest.mark.parametrize("route", ["staged", "flat"])
def test_one_wait_on_the_host_in_each_step(ranks, route):
    """test_torch_device.py has jobs that are not elastic: none there."""
    environment = placing.environment("fake", route) | {replica_check.VARIABLE: "off"}  # which waits once
    for waits, aborts, misuse in ranks.survive(rank_counts_waits, (2,), hosts=[[0, 1], [2]], environment=environment):
        assert waits == STEPS and aborts == (route == "flat") and not misuse, (waits, aborts, misuse)


def rank_averages():
    """How often the host waits in asynchronous training, until it has averaged once."""
    bagua.init_process_group()
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    model.with_bagua([optimizer], Algorithm.init("async", sync_interval_ms=0))
    runtime = fake_device.RUNTIME
    runtime.watch_this_thread()
    before = runtime.synchronisations()
    for step in range(2000):
        optimizer.zero_grad()
        wide_square(model, current().membership.member, step).backward()
        optimizer.step()
        if runtime.synchronisations() > before:
            break
    return runtime.synchronisations() - before


def test_averages_in_the_background_are_awaited(ranks):
    assert ranks.survive(rank_averages, (), 2, environment=placing.environment("fake", "staged")) == [1, 1]


@pytest.mark.parametrize(
    ("route", "options"),
    [
        ("staged", {}),
        pytest.param("flat", {"codec": "int4"}, marks=pytest.mark.full),
        pytest.param("flat", {"peer_selection_mode": "shift_one"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_one_is_lost_while_another_waits(ranks, tmp_path, route, options):
    """As on the CPU. Members of a device's communicator wait for each other when it is made, and NCCL in its first
    operation: not in a forward pass."""
    arguments = {"folder": str(tmp_path), "becomes": 3, "gone": 2, **options}
    arguments["environment"] = placing.environment("fake", route) | CONNECTS
    assert ranks.survive(averages.rank_one_waits, (2,), hosts=[[0, 1], [2, 3]], **arguments) == [3] * 3


@pytest.mark.parametrize("route", [pytest.param("staged"), pytest.param("flat", marks=pytest.mark.full)])
def test_one_joins_while_another_waits(ranks, tmp_path, route):
    arguments = {"folder": str(tmp_path), "becomes": 4, "environment": placing.environment("fake", route) | CONNECTS}
    ranks.start(averages.rank_one_waits, hosts=[[0], [1]], elastic=True, **arguments)
    ranks.join(averages.rank_one_waits, [2, 3], 2, **arguments)  # each rank has a GPU of its own
    assert ranks.left() == [4] * 4
