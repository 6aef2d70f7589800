"""CUDA tensors without a GPU: CPU tensors count as a device's, over the fakes of tests/native/leg."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig.ranks import fake_device, placing
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import test_torch_primitives as primitives

import bagua.torch_api as bagua
from bagua.algorithms import AsyncModelAverageAlgorithm
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job import connection, torch_distributed
from bagua.torch_api.job.session import current
from bagua.torch_api.step.parameters import _refuse_several_devices

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the fakes"
)
STEPS = 6


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + bagua.get_rank())
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.randn(4, 8, generator=generator).to(placing.device())).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def new_model() -> nn.Module:
    torch.manual_seed(bagua.get_rank())
    return placing.placed(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 4)))


def rank_primitives() -> dict[str, int]:
    """The scenarios of the CPU."""
    torch.set_default_device(placing.device())
    primitives.rank_moves()
    bagua.init_process_group = lambda: None  # once is enough
    primitives.rank_reductions()
    assert bagua.communication.broadcast_object({"rank": bagua.get_rank()}, 2) == {"rank": 2}
    several = [torch.full((3,), float(bagua.get_rank())), torch.ones(2, 2, dtype=torch.int64)]
    bagua.communication.allreduce_coalesced_inplace(several)
    assert several[0].tolist() == [6.0] * 3 and several[1].tolist() == [[4, 4], [4, 4]]
    me = bagua.get_rank()
    counts = [[(i + j) % 3 for j in range(4)] for i in range(4)]
    given = torch.full((sum(counts[me]),), me)
    got = torch.full((sum(row[me] for row in counts),), -1)
    places = [[sum(row[:j]) for j in range(4)] for row in (counts[me], [row[me] for row in counts])]
    bagua.alltoall_v(given, counts[me], places[0], got, [row[me] for row in counts], places[1])
    assert got.tolist() == [i for i in range(4) for _ in range(counts[i][me])]
    assert bagua.empty(3, device=placing.device()).tolist() == [0, 0, 0]
    [device] = devices(current()).all()
    counters: dict[str, int] = device.counters()
    return counters


@pytest.mark.parametrize(
    "route",
    [pytest.param(route, marks=() if route == "hierarchical" else pytest.mark.full) for route in placing.ROUTES],
)
def test_primitives(ranks: Any, route: str) -> None:
    """As they are on the CPU, and by the leg."""
    found = ranks.run(rank_primitives, hosts=[[0, 1], [2, 3]], environment=placing.environment("fake", route))
    for counters in found:
        assert counters["ops"] > 100 and counters[f"ops_{route}"] > 0, counters


def rank_alltoall_fails_half_way() -> list[bool]:
    """Whether the memory of what is still on its way is kept."""
    bagua.init_process_group()
    submit, place_empty = CudaConnection.submit, CudaConnection.place_empty
    kinds: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def submit_two(self: CudaConnection, request: Any) -> int:
        kinds.append(request["kind"])
        if len(kinds) > 2:
            raise CommunicationError("half-way")
        return submit(self, request)

    def place(self: CudaConnection, *what: Any, **more: Any) -> Any:
        found = place_empty(self, *what, **more)
        made.append(weakref.ref(found[0]))
        return found

    CudaConnection.submit, CudaConnection.place_empty = submit_two, place  # type: ignore[assignment, method-assign]
    try:
        bagua.alltoall_v(torch.ones(9), [3] * 3, [0, 3, 6], torch.zeros(9), [3] * 3, [0, 3, 6])
    except CommunicationError as error:
        assert str(error) == "half-way"
    gc.collect()
    return [one() is not None for one in made]


def test_memory_of_an_exchange_that_fails_is_kept(ranks: Any) -> None:
    found = ranks.run(rank_alltoall_fails_half_way, 3, environment=placing.environment("fake", "staged"))
    assert found == [[True, True]] * 3


def rank_does_not_come(folder: str) -> str:
    """The last rank lives and never comes, until the others have given it up."""
    connection.FIRST_WARNING_S = connection.WARNING_EVERY_S = 0.5
    bagua.init_process_group()
    me, last, told = bagua.get_rank(), bagua.get_world_size() - 1, ""
    tensor = torch.ones(1000)
    bagua.allreduce_inplace(tensor)
    if me != last:
        # As if BAGUA_WAIT_TIMEOUT_S had said so, but for the start, when ranks wait for slow ones.
        current().connection._wait_limit_s = 1.0
        with pytest.raises(CommunicationError) as error:
            for _ in range(2):  # the first one's result is garbage, as after an abort of NCCL
                bagua.allreduce_inplace(tensor)
        told = str(error.value)
        (Path(folder) / f"given-up-{me}").touch()
    deadline = time.monotonic() + 60  # then the others say what they have been waiting for
    while me == last and len(list(Path(folder).glob("given-up-*"))) < last and time.monotonic() < deadline:
        time.sleep(0.05)
    return told


@pytest.mark.parametrize(
    ("route", "hosts"),
    [
        ("staged", [[0, 1]]),
        ("flat", [[0], [1]]),
        pytest.param("hierarchical", [[0, 1], [2, 3]], marks=pytest.mark.full),
    ],
)
def test_a_rank_that_never_comes_is_given_up(ranks: Any, route: str, hosts: list[list[int]], tmp_path: Path) -> None:
    """As on the CPU: by one at least; others may learn first that it has left, or that NCCL's connection is gone."""
    environment = placing.environment("fake", route)
    told = ranks.run(rank_does_not_come, hosts=hosts, environment=environment, folder=str(tmp_path))
    gave_up = [text for text in told if "gave up after 1 s" in text and "BAGUA_WAIT_TIMEOUT_S" in text]
    assert gave_up and all(told[:-1]), told
    who = "waiting for rank 1" if route == "staged" else "NCCL has not ended all-reduce of communicator"
    assert any(who in text for text in gave_up), told


def rank_counts_waits() -> tuple[int, int, str, bool]:
    bagua.init_process_group()
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.with_bagua([optimizer])  # type: ignore[operator]
    for step in range(3):  # records the order of gradients, makes buckets and memory
        train(model, optimizer, step)
    runtime = fake_device.RUNTIME
    assert runtime is not None
    [device] = devices(current()).all()
    runtime.watch_this_thread()
    before, waits = runtime.synchronisations(), device.counters()["host_waits"]
    for step in range(3, 3 + STEPS):
        train(model, optimizer, step)
    counted = runtime.synchronisations() - before, device.counters()["host_waits"] - waits
    statistics = bagua.communication.statistics()
    sane = statistics.steps == 3 + STEPS and statistics.comm_seconds > 0
    model.bagua_ddp.close()  # type: ignore[operator, union-attr]
    return (*counted, runtime.misuse(), sane)


def test_no_step_waits_on_the_host(ranks: Any) -> None:
    """Once the first steps are over."""
    found = ranks.run(rank_counts_waits, hosts=[[0, 1], [2]], environment=placing.environment("fake", "staged"))
    # A lane gives memory back shortly after a result is there, so a step may have to make some once.
    assert all(found_here[0] == 0 and found_here[1] < STEPS // 2 for found_here in found), found
    assert [found_here[2:] for found_here in found] == [("", True)] * 3


def raise_after_all_is_submitted(_: torch.Tensor) -> None:
    raise ArithmeticError


def rank_closes_alone() -> tuple[bool, str]:
    """Rank 1's pass ends by an exception, while rank 0 is elsewhere: whether both could train another model then."""
    bagua.init_process_group()
    runtime, model = fake_device.RUNTIME, new_model()
    assert runtime is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.with_bagua([optimizer])  # type: ignore[operator]
    for step in range(3):
        train(model, optimizer, step)
    if bagua.get_rank() == 1:
        next(model.parameters()).register_post_accumulate_grad_hook(raise_after_all_is_submitted)
        with pytest.raises(ArithmeticError):
            train(model, optimizer, 3)
        model.bagua_ddp.close(alone=True)  # type: ignore[operator, union-attr]
        runtime.synchronize()  # nothing in the stream waits for rank 0
    bagua.barrier()
    if bagua.get_rank() == 0:
        model.bagua_ddp.close(alone=True)  # type: ignore[operator, union-attr]
    another = new_model()
    optimizer = torch.optim.SGD(another.parameters(), lr=0.1)
    another = another.with_bagua([optimizer])  # type: ignore[operator]
    for step in range(STEPS):
        train(another, optimizer, step)
    mine = torch.cat([parameter.detach().flatten() for parameter in another.parameters()])
    told = mine.clone()
    bagua.broadcast(told, src=0)
    return torch.equal(mine, told), runtime.misuse()


@pytest.mark.parametrize("route", ["staged", "flat"])
def test_a_rank_ends_the_exchange_alone(ranks: Any, route: str) -> None:
    found = ranks.run(rank_closes_alone, 2, environment=placing.environment("fake", route))
    assert found == [(True, "")] * 2


def rank_averages_out_of_step() -> list[int]:
    """Operations that were handed to the device: before all ranks have begun the average, and after that."""
    bagua.init_process_group()
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=0))
    [device] = devices(current()).all()
    found = [device.counters()["ops"]]
    if bagua.get_rank() == 0:
        train(model, optimizer, 0)
        time.sleep(0.2)
        found.append(device.counters()["ops"])
    bagua.barrier()
    if bagua.get_rank() != 0:
        found.append(device.counters()["ops"])
        train(model, optimizer, 0)
    deadline = time.monotonic() + 60
    while not all(bucket.execution.done() for bucket in model.bagua_buckets):
        assert time.monotonic() < deadline, "the average was handed over, wherever programs are"
        time.sleep(0.01)
    found.append(device.counters()["ops"])
    bagua.barrier()
    for step in range(STEPS):
        train(model, optimizer, step)
    model.bagua_ddp.close()
    return found


@pytest.mark.parametrize("route", ["staged", "flat"])
def test_averages_out_of_step_hold_no_device(ranks: Any, route: str) -> None:
    """A device that waits for ranks that have not begun would hold up calls that wait for the whole of it."""
    for before, alone, after in ranks.run(
        rank_averages_out_of_step, hosts=[[0, 1]], environment=placing.environment("fake", route)
    ):
        assert before == alone < after


def rank_is_killed(route: str) -> str:
    bagua.init_process_group()
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = model.with_bagua([optimizer])  # type: ignore[operator]
    try:
        for step in range(10_000):
            if bagua.get_rank() == 3 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, step)
    except CommunicationError as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("route", placing.ROUTES)
def test_a_killed_rank_frees_the_others(ranks: Any, route: str) -> None:
    """They get the reason."""
    ranks.start(rank_is_killed, hosts=[[0, 1], [2, 3]], environment=placing.environment("fake", route), route=route)
    ranks.wait(200.0)
    for rank in ranks.started[:3]:
        assert "rank 3" in rank.result(), rank.result()
    assert ranks.started[3].process.returncode == -signal.SIGKILL


def rank_without_cuda() -> list[str]:
    bagua.init_process_group()
    found = []
    for _ in range(2):
        try:
            new_model().with_bagua([])  # type: ignore[operator]
        except BaguaError as error:
            found.append(str(error))
    return found


@pytest.mark.skipif(
    not torch_distributed.connects_lazily(),
    reason="before torch 2.8 ranks vote on torch.distributed by a CPU tensor, which the fakes take for a device's",
)
def test_what_is_missing_is_told(ranks: Any) -> None:
    """By name, on every rank."""
    variables = placing.environment("fake") | {"FAKE_CUDA": placing.environment("fake")["BAGUA_DEVICE_CUDART"]}
    variables["BAGUA_DEVICE_CUDART"] = "/nowhere/libcudart.so"
    for messages in ranks.run(rank_without_cuda, 2, environment=variables):
        assert len(messages) == 2 and all("/nowhere/libcudart.so" in message for message in messages), messages


def test_one_device_for_all_parameters() -> None:
    """Those of two are refused by name."""
    here, there = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=torch.device("cuda", 1))
    _refuse_several_devices([("a", here), ("b", here)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"a is on cpu and b on cuda:1.*one device"):
        _refuse_several_devices([("a", here), ("b", there)])  # type: ignore[list-item]
