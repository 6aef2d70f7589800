"""CUDA tensors without a GPU: CPU tensors count as a device's, over the fakes of tests/native/leg."""

import gc
import os
import shutil
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_torch_primitives as primitives
import torch
from rig.files import await_file
from rig.ranks import fake_device, placing
from torch import nn

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


def train(model, optimizer, step):
    generator = torch.Generator().manual_seed(10 * step + bagua.get_rank())
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, generator=generator).to(placing.device())).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def new_model():
    torch.manual_seed(bagua.get_rank())
    return placing.placed(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 4)))


def wrapped(algorithm=None):
    """A model, and its optimizer."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model.with_bagua([optimizer], algorithm), optimizer


def rank_primitives():
    """The scenarios of the CPU."""
    bagua.init_process_group()
    torch.set_default_device(placing.device())
    primitives.rank_moves_and_reduces()
    primitives.rank_sends_blocks()
    primitives.rank_sends_objects_and_lists()
    assert bagua.empty(3, device=placing.device()).tolist() == [0, 0, 0]
    [device] = devices(current()).all()
    return device.counters()


@pytest.mark.parametrize(
    "route",
    [pytest.param(route, marks=() if route == "hierarchical" else pytest.mark.full) for route in placing.ROUTES],
)
def test_primitives(ranks, route):
    found = ranks.run(rank_primitives, hosts=[[0, 1], [2, 3]], environment=placing.environment("fake", route))
    for counters in found:
        assert counters["ops"] > 100 and counters[f"ops_{route}"] > 0, counters


def rank_alltoall_fails_half_way():
    """The memory of what is still on its way is kept."""
    submit, place_empty, kinds, made = CudaConnection.submit, CudaConnection.place_empty, [], []

    def submit_two(self, request):
        kinds.append(request["kind"])
        if len(kinds) > 2:
            raise CommunicationError("half-way")
        return submit(self, request)

    def place(self, *what, **more):
        found = place_empty(self, *what, **more)
        made.append(weakref.ref(found[0]))
        return found

    bagua.init_process_group()
    CudaConnection.submit, CudaConnection.place_empty = submit_two, place
    with pytest.raises(CommunicationError, match="half-way"):
        bagua.alltoall_v(torch.ones(9), [3] * 3, [0, 3, 6], torch.zeros(9), [3] * 3, [0, 3, 6])
    gc.collect()
    assert [one() is not None for one in made] == [True, True]


def test_memory_of_an_exchange_that_fails_is_kept(ranks):
    ranks.run(rank_alltoall_fails_half_way, 3, environment=placing.environment("fake", "staged"))


def rank_does_not_come(folder):
    """Rank 1 lives and never comes. Returns what rank 0 is told."""
    connection.FIRST_WARNING_S = connection.WARNING_EVERY_S = 0.5
    bagua.init_process_group()
    tensor, given_up = torch.ones(1000), Path(folder, "given up")
    bagua.allreduce_inplace(tensor)
    if bagua.get_rank() == 1:
        await_file(given_up)
        return ""
    # As if BAGUA_WAIT_TIMEOUT_S had said so, but for the start, when ranks wait for slow ones.
    current().connection._wait_limit_s = 1.0
    with pytest.raises(CommunicationError) as error:
        for _ in range(2):  # the first one's result is garbage, as after an abort of NCCL
            bagua.allreduce_inplace(tensor)
    given_up.touch()
    return str(error.value)


@pytest.mark.parametrize(
    ("route", "hosts", "words"),
    [("staged", [[0, 1]], "waiting for rank 1"), ("flat", [[0], [1]], "NCCL has not ended all-reduce of communicator")],
)
def test_a_rank_that_never_comes_is_given_up(ranks, route, hosts, words, tmp_path):
    environment = placing.environment("fake", route)
    told, _ = ranks.run(rank_does_not_come, hosts=hosts, environment=environment, folder=str(tmp_path))
    assert words in told and "gave up after 1 s" in told and "BAGUA_WAIT_TIMEOUT_S" in told, told


def rank_counts_waits():
    model, optimizer = wrapped()
    for step in range(3):  # records the order of gradients, makes buckets and memory
        train(model, optimizer, step)
    runtime, [device] = fake_device.RUNTIME, devices(current()).all()
    runtime.watch_this_thread()
    statistics = bagua.communication.statistics()
    before, waits = runtime.synchronisations(), device.counters()["host_waits"]
    for step in range(3, 3 + STEPS):
        train(model, optimizer, step)
    counted = runtime.synchronisations() - before, device.counters()["host_waits"] - waits
    after = bagua.communication.statistics()
    assert after.steps == statistics.steps + STEPS and after.comm_seconds > statistics.comm_seconds
    # A lane gives memory back shortly after a result is there, so a step may have to make some once.
    assert counted[0] == 0 and counted[1] < STEPS // 2 and runtime.misuse() == "", counted
    model.bagua_ddp.close()


def test_no_step_waits_on_the_host(pools):
    pools([0, 1], environment=placing.environment("fake", "staged")).run(rank_counts_waits)


def raise_after_all_is_submitted(_):
    raise ArithmeticError


def rank_closes_alone():
    """Rank 1's pass ends by an exception, while rank 0 is elsewhere: both can train another model then."""
    runtime, (model, optimizer) = fake_device.RUNTIME, wrapped()
    for step in range(3):
        train(model, optimizer, step)
    if bagua.get_rank() == 1:
        next(model.parameters()).register_post_accumulate_grad_hook(raise_after_all_is_submitted)
        with pytest.raises(ArithmeticError):
            train(model, optimizer, 3)
        model.bagua_ddp.close(alone=True)
        runtime.synchronize()  # nothing in the stream waits for rank 0
    bagua.barrier()
    if bagua.get_rank() == 0:
        model.bagua_ddp.close(alone=True)
    another, optimizer = wrapped()
    for step in range(STEPS):
        train(another, optimizer, step)
    mine = torch.cat([parameter.detach().flatten() for parameter in another.parameters()])
    told = mine.clone()
    bagua.broadcast(told, src=0)
    another.bagua_ddp.close()
    assert torch.equal(mine, told) and runtime.misuse() == ""


@pytest.mark.parametrize("route", ["staged", "flat"])
def test_a_rank_ends_the_exchange_alone(pools, route):
    pools([0, 1], environment=placing.environment("fake", route)).run(rank_closes_alone)


def rank_averages_out_of_step():
    """Operations that were handed to the device: before all ranks have begun the average, and after that."""
    model, optimizer = wrapped(AsyncModelAverageAlgorithm(sync_interval_ms=0))
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
def test_averages_out_of_step_hold_no_device(pools, route):
    """A device that waits for ranks that have not begun would hold up calls that wait for the whole of it."""
    ranks = pools([0, 1], environment=placing.environment("fake", route))
    for before, alone, after in ranks.run(rank_averages_out_of_step):
        assert before == alone < after


def rank_without_cuda():
    bagua.init_process_group()
    for _ in range(2):
        with pytest.raises(BaguaError, match=r"/nowhere/libcudart\.so"):
            new_model().with_bagua([])


@pytest.mark.skipif(
    not torch_distributed.connects_lazily(),
    reason="before torch 2.8 ranks vote on torch.distributed by a CPU tensor, which the fakes take for a device's",
)
def test_what_is_missing_is_told(ranks):
    variables = placing.environment("fake") | {"FAKE_CUDA": placing.environment("fake")["BAGUA_DEVICE_CUDART"]}
    variables["BAGUA_DEVICE_CUDART"] = "/nowhere/libcudart.so"
    ranks.run(rank_without_cuda, 2, environment=variables)


def test_one_device_for_all_parameters():
    here, there = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=torch.device("cuda", 1))
    _refuse_several_devices([("a", here), ("b", here)])
    with pytest.raises(TypeError, match=r"a is on cpu and b on cuda:1.*one device"):
        _refuse_several_devices([("a", here), ("b", there)])
