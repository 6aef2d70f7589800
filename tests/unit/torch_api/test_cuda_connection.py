"""The parts of a CudaConnection, without a GPU: numbers of communicators, memory in use, moments, logs."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm import members
from bagua.torch_api.cuda import connection, port
from bagua.torch_api.cuda.step_times import TOGETHER, CudaSteps
from bagua.torch_api.job.connection import Regrouped


def test_twins_have_numbers_of_their_own() -> None:
    """Those of each device, and of counted communicators below what the hierarchical route can take."""
    numbers = [members.twin_number(number, device) for number in range(50) for device in range(6)]
    numbers += [members.twin_number(members.SUBGROUPS + number, device) for number in range(50) for device in range(6)]
    assert len(set(numbers)) == len(numbers)
    assert all(members.twin_number(number, device) < 1 << 23 for number in range(50) for device in range(4))
    assert all(number >= members.TWINS for number in numbers)


def test_a_place_keeps_its_memory() -> None:
    memory = torch.zeros(3)
    alive = weakref.ref(memory)
    place = connection.CudaPlace(memory)
    assert place == (connection.DEVICE, memory.data_ptr())
    del memory
    gc.collect()
    assert alive() is not None
    del place
    gc.collect()
    assert alive() is None


class TicketLeg:
    """Tickets of a leg: times of one that was released are zeros (see csrc/gpu/leg/__init__.pyi)."""

    def __init__(self) -> None:
        self.released: set[int] = set()

    def wait(self, ticket: int, stream: int) -> None:
        pass

    def release(self, ticket: int) -> None:
        self.released.add(ticket)

    def times(self, ticket: int) -> tuple[int, int, int]:
        return (0, 0, 0) if ticket in self.released else (ticket, ticket + 1, ticket + 2)


class PassedMoment:
    def passed(self) -> bool:
        return True

    def await_on_host(self) -> None:
        pass

    def nanoseconds(self) -> int:
        return 10


def test_steps_whose_tickets_were_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that stays open while many other operations are waited for is counted without their times."""
    counted: list[list[tuple[int, int, int]]] = []

    class Recorder:
        def add_step(self, operations: list[tuple[int, int, int]], begin: int, end: int) -> None:
            counted.append(operations)

    monkeypatch.setattr(connection, "KEPT_TICKETS", 3)
    device: Any = connection.CudaConnection.__new__(connection.CudaConnection)
    device.index, device._leg, device._error = 0, TicketLeg(), RuntimeError
    device._cuda = type("NoCuda", (), {"stream": lambda self, index: 0})()
    device._waited, device._in_use = deque(), {}
    recorder: Any = Recorder()
    steps = CudaSteps(recorder, device._last_times)
    operations = [device.wait(ticket) for ticket in (1, 2)]
    for ticket in range(3, 6):
        device.wait(ticket)
    steps.add(operations, PassedMoment(), PassedMoment())
    steps.add([device.wait(6)], PassedMoment(), PassedMoment())
    steps.settle()
    assert counted == [[], [(6, 7, 10)]]
    assert 6 in device._leg.released  # nobody asks again: the next operation has its events


def test_steps_are_looked_at_together() -> None:
    """Some at a time; all of them where they are asked for."""
    counted: list[int] = []
    recorder: Any = SimpleNamespace(add_step=lambda operations, begin, end: counted.append(end))
    steps = CudaSteps(recorder, lambda ticket: (0, 0, 0))
    for _ in range(TOGETHER - 1):
        steps.add([], PassedMoment(), PassedMoment())
    assert not counted
    steps.add([], PassedMoment(), PassedMoment())
    assert len(counted) == TOGETHER
    steps.add([], PassedMoment(), PassedMoment())
    assert len(counted) == TOGETHER
    steps.settle(wait=True)
    assert len(counted) == TOGETHER + 1


@pytest.mark.parametrize(
    ("elastic", "leg_failed", "entered", "over_after", "told", "looks"),
    [
        (True, True, 1, 2, Regrouped, 2),  # the engines hear of the loss later than NCCL
        (True, True, 1, 99, CommunicationError, connection.VERDICT_S),
        (True, False, 1, 2, CommunicationError, 0),  # a call that can't be: no member is lost
        (False, True, 1, 2, CommunicationError, 0),
        (True, True, 2, 99, Regrouped, 0),  # what was under way is given up in the next generation, which is well
    ],
)
def test_who_failed_is_decided_by_the_engines(
    monkeypatch: pytest.MonkeyPatch,
    elastic: bool,
    leg_failed: bool,
    entered: int,
    over_after: int,
    told: type[Exception],
    looks: float,
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(connection.time, "monotonic", lambda: float(len(asked)))
    monkeypatch.setattr(connection.time, "sleep", asked.append)
    device: Any = connection.CudaConnection.__new__(connection.CudaConnection)
    device._leg = SimpleNamespace(error=lambda: "NCCL: its connection broke" if leg_failed else "")
    device.membership, device._parted = SimpleNamespace(generation=1), False
    device.connection = SimpleNamespace(
        elastic=elastic,
        generation_is_over=lambda: elastic and len(asked) >= over_after,
        membership=SimpleNamespace(generation=entered),
    )
    assert type(device._translate(RuntimeError("words"))) is told
    assert len(asked) == looks


class FakeEvent:
    """A CUDA event that knows when it was recorded, in ms; distances are float32."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: FakeEvent) -> float:
        return float(np.float32(later.at_ms - self.at_ms))


class FakeClock(port._EventClock):
    now_ms = 0.0

    def _record(self) -> Any:
        return FakeEvent(self.now_ms)


def test_moments_stay_exact() -> None:
    """Ten hours after the start, a step of 3.217 ms takes 3.217 ms."""
    clock = FakeClock(0)
    start_ns = clock.anchor[1]
    for _ in range(36_000):
        clock.now_ms += 1000.0
        begin = clock.now()
        clock.now_ms += 3.217
        end = clock.now()
        taken = end.nanoseconds() - begin.nanoseconds()
        assert abs(taken - 3_217_000) < 10_000
    assert abs((end.nanoseconds() - start_ns) * 1e-6 - clock.now_ms) < 10.0


def test_routes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A warning where one could not be set up."""
    with caplog.at_level(logging.INFO, "bagua"):
        connection._log_route([0, 1], "flat", {"hierarchical": "one host"}, {}, "")
        connection._log_route([0, 1], "staged", {}, {"flat": "rank 1: NCCL: no network"}, "")
        connection._log_route([0, 1], "flat", {}, {}, "rank 1: NCCL: no child")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", "CUDA tensors of ranks [0, 1] take route flat; hierarchical is not possible: one host"),
        (
            "WARNING",
            "CUDA tensors of ranks [0, 1] take route staged; flat could not be set up: rank 1: NCCL: no network",
        ),
        (
            "WARNING",
            "CUDA tensors of ranks [0, 1] take route flat; NCCL enqueues by threads of its own (slower): rank 1: "
            "NCCL: no child",
        ),
    ]
