"""Elastic jobs with models on GPUs, without a GPU: CPU tensors count as a device's, over the fakes of
tests/native/leg."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.ranks import fake_device, placing
from rig.ranks.engine_hosts import Ranks
from rig.ranks.faults import VARIABLE, kill_self

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import test_torch_elastic as losses
import test_torch_elastic_async as averages
import test_torch_joins as joins
from training_scenarios.support import seeded, sgd, wide_mlp, wide_square, wrap

import bagua.torch_api as bagua
from bagua.base import replica_check
from bagua.base.errors import MembershipChanged
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.session import current

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the fakes"
)
STEPS = 5
CONNECTS = {"FAKE_NCCL_CONNECTS": "1"}


ROUTES: list[tuple[str, list[list[int]], list[losses.Kill]]] = [
    (route, hosts, kills)
    for route, hosts in (("staged", [[0, 1, 2, 3, 4]]), ("flat", [[0, 1, 2], [3, 4]]), ("", [[0, 1, 2], [3, 4]]))
    for kills in losses.JOBS[:2]
]


# Without --full, the route of most jobs; the contract suite has the others without losses.
@pytest.mark.parametrize(
    ("route", "hosts", "kills"),
    [
        pytest.param(
            *case,
            marks=() if number == 2 else pytest.mark.full,
            id=f"{case[0] or 'measured'}-{' '.join(kill.phase for kill in case[2])}",
        )
        for number, case in enumerate(ROUTES)
    ],
)
def test_the_others_go_on_when_ranks_are_killed(
    ranks: Ranks, route: str, hosts: list[list[int]], kills: list[losses.Kill]
) -> None:
    """As on the CPU: a step counts with all members, or again with those that are left."""
    lose_some(ranks, route, hosts, kills, {})


@pytest.mark.full
@pytest.mark.parametrize("blocking", ["1", "0"])
def test_the_others_go_on_where_nccl_connects(ranks: Ranks, blocking: str) -> None:
    """Survivors are inside NCCL, which makes connections with the lost one, or in operations that wait for it."""
    lose_some(ranks, *ROUTES[2], {**CONNECTS, "BAGUA_NCCL_BLOCKING": blocking})


def lose_some(ranks: Ranks, route: str, hosts: list[list[int]], kills: list[losses.Kill], more: dict[str, str]) -> None:
    """Trains while ranks are killed, with ``more`` variables."""
    told = " ".join(f"{kill.member}:{kill.step}:{kill.bucket}:{kill.phase}" for kill in kills)
    environment = placing.environment("fake", route) | {VARIABLE: told, "BAGUA_DEFAULT_BUCKET_SIZE": "3000"}
    ranks.start(losses.rank_train, hosts=hosts, elastic=True, environment=environment | more)
    ranks.wait(120.0)
    losses.check_survivors(ranks, kills)


def test_newcomers_join(ranks: Ranks, tmp_path: Path) -> None:
    environment = placing.environment("fake", "staged")
    joins.start(ranks, tmp_path, [[0, 1]], {"4": "planned-2"}, environment=environment)
    joins.join(ranks, tmp_path, [2], 4, 0, environment=environment)
    joins.join(ranks, tmp_path, [3], 4, 1, environment=environment)
    members_of = joins.check(joins.results_of(ranks))
    assert [sorted(members) for members in members_of[:6]] == [[0, 1]] * 4 + [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("route", ["staged", pytest.param("flat", marks=pytest.mark.full)])
def test_newcomers_rest_while_a_step_is_repeated(ranks: Ranks, tmp_path: Path, route: str) -> None:
    """They come with a loss in the middle of a step: communicators are made for the step without them, and again, in
    the same generation, with them."""
    environment = placing.environment("fake", route)
    joins.start(ranks, tmp_path, [[0, 1, 2]], {"3": "ready"}, environment=environment | {VARIABLE: "2:4:0:submitted"})
    assert ranks.regrouper is not None
    ranks.regrouper.plans, ranks.regrouper.on_ready = False, (tmp_path / "ready").touch
    joins.join(ranks, tmp_path, [3, 4], 2, 1, environment=environment)  # each rank has a GPU of its own
    results = joins.results_of(ranks, (2,))
    joins.check_equal(results)
    assert [[step for step, *_ in result["steps"]][:2] for result in results] == [[1, 2]] * 2 + [[5, 6]] * 2


def rank_counts_waits() -> tuple[int, int, str]:
    """Waits of the host in some steps, NCCL's aborts when a rank was lost, and what CUDA does not allow."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    runtime = fake_device.RUNTIME
    assert runtime is not None
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
def test_one_wait_on_the_host_in_each_step(ranks: Ranks, route: str) -> None:
    """test_torch_device.py has jobs that are not elastic: none there."""
    environment = placing.environment("fake", route) | {replica_check.VARIABLE: "off"}  # which waits once
    ranks.start(rank_counts_waits, hosts=[[0, 1], [2]], elastic=True, environment=environment)
    ranks.wait(60.0)
    for one in ranks.started[:2]:
        waits, aborts, misuse = one.result()
        assert waits == STEPS and aborts == (route == "flat") and not misuse, (waits, aborts, misuse)


def rank_reduces() -> Any:
    """The user's own all-reduce, and an all-gather, when a rank is lost before each."""
    bagua.init_process_group()
    member = current().membership.member
    tensor = torch.full((2000,), 2.0**member)
    bagua.allreduce_inplace(tensor)
    if member == 0:
        kill_self()
    mine = torch.full((2000,), 2.0**member)
    bagua.allreduce_inplace(mine)
    if member == 1:
        kill_self()
    everyone = torch.zeros(2 * 3)
    with pytest.raises(MembershipChanged, match="not repeated by itself"):
        bagua.allgather(torch.ones(2), everyone)
    again = torch.zeros(4)
    bagua.allgather(torch.full((2,), float(member)), again)
    return tensor[0].item(), mine[-1].item(), again.tolist()


def test_primitives_of_the_program(ranks: Ranks) -> None:
    """An all-reduce is repeated; an all-gather says that a rank was lost, and where it happened."""
    ranks.start(rank_reduces, nprocs=4, elastic=True, environment=placing.environment("fake", "staged"))
    ranks.wait(60.0)
    assert [one.result() for one in ranks.started[2:]] == [(15, 14, [2, 2, 3, 3])] * 2


def rank_averages() -> int:
    """How often the host waits in asynchronous training, until it has averaged once."""
    bagua.init_process_group()
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    model.with_bagua([optimizer], Algorithm.init("async", sync_interval_ms=0))
    runtime = fake_device.RUNTIME
    assert runtime is not None
    runtime.watch_this_thread()
    before = runtime.synchronisations()
    for step in range(2000):
        optimizer.zero_grad()
        wide_square(model, current().membership.member, step).backward()
        optimizer.step()
        if runtime.synchronisations() > before:
            break
    return runtime.synchronisations() - before


def test_averages_in_the_background_are_awaited(ranks: Ranks) -> None:
    """They are no units, and a leg that fails frees them without a result, too."""
    ranks.start(rank_averages, nprocs=2, elastic=True, environment=placing.environment("fake", "staged"))
    ranks.wait(60.0)
    assert [one.result() for one in ranks.started] == [1, 1]


@pytest.mark.parametrize(
    ("route", "options"),
    [
        ("staged", {}),
        pytest.param("flat", {"codec": "int4"}, marks=pytest.mark.full),
        pytest.param("staged", {"peer_selection_mode": "shift_one"}, marks=pytest.mark.full),
        pytest.param("flat", {"peer_selection_mode": "shift_one"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_one_is_lost_while_another_waits(ranks: Ranks, tmp_path: Path, route: str, options: dict[str, Any]) -> None:
    """As on the CPU. Members of a device's communicator wait for each other when it is made, and NCCL in its first
    operation: not in a forward pass."""
    start, arguments = ranks.start, {"folder": str(tmp_path), "becomes": 3, "gone": 2, **options}
    environment = placing.environment("fake", route) | CONNECTS
    start(averages.rank_one_waits, hosts=[[0, 1], [2, 3]], elastic=True, environment=environment, **arguments)
    ranks.wait(averages.DEADLINE_S)
    assert [ranks.started[member].result() for member in (0, 1, 3)] == [3] * 3


@pytest.mark.parametrize("route", [pytest.param("staged"), pytest.param("flat", marks=pytest.mark.full)])
def test_one_joins_while_another_waits(ranks: Ranks, tmp_path: Path, route: str) -> None:
    arguments = {"folder": str(tmp_path), "becomes": 4, "environment": placing.environment("fake", route) | CONNECTS}
    ranks.start(averages.rank_one_waits, hosts=[[0], [1]], elastic=True, **arguments)
    ranks.join(averages.rank_one_waits, [2, 3], 2, **arguments)  # each rank has a GPU of its own
    ranks.wait(averages.DEADLINE_S)
    assert [one.result() for one in ranks.started] == [4] * 4
