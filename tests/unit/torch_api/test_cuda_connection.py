"""The parts of a CudaConnection, without a GPU: numbers of communicators, memory in use, moments, logs."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm import members
from bagua.torch_api.cuda import connection, port
from bagua.torch_api.job.connection import Regrouped


def test_twins_have_numbers_of_their_own():
    """Those of each device, and of counted communicators below what the hierarchical route can take."""
    numbers = [members.twin_number(number, device) for number in range(50) for device in range(6)]
    numbers += [members.twin_number(members.SUBGROUPS + number, device) for number in range(50) for device in range(6)]
    assert len(set(numbers)) == len(numbers)
    assert all(members.twin_number(number, device) < 1 << 23 for number in range(50) for device in range(4))
    assert all(number >= members.TWINS for number in numbers)


def test_a_place_keeps_its_memory():
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
def test_who_failed_is_decided_by_the_engines(monkeypatch, elastic, leg_failed, entered, over_after, told, looks):
    asked = []
    monkeypatch.setattr(connection.time, "monotonic", lambda: float(len(asked)))
    monkeypatch.setattr(connection.time, "sleep", asked.append)
    device = connection.CudaConnection.__new__(connection.CudaConnection)
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

    def __init__(self, at_ms):
        self.at_ms = at_ms

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(np.float32(later.at_ms - self.at_ms))


class FakeClock(port._EventClock):
    now_ms = 0.0

    def _record(self):
        return FakeEvent(self.now_ms)


def test_moments_stay_exact():
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
