"""Memory that tensors leave goes back to the daemon, or serves the next ones where that was asked for."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from bagua.torch_api.job.shared_memory import SharedMemory
from bagua.torch_api.job.stages import Stages, rounded


class Segment(bytearray):
    """Stands in for the core's."""

    def __init__(self, nbytes, number):
        super().__init__(b"\x07" * nbytes)
        self.nbytes, self.id = nbytes, number
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self))


class Daemon:
    """Stands in for the connection: segments in whole pages."""

    def __init__(self):
        self.made = 0
        self.held = {}
        self.most = 0
        self.required = []

    def alloc(self, nbytes, for_peers=False):
        self.made += 1
        made = Segment(-(-nbytes // 4096) * 4096, self.made)
        self.held[made.id] = made.nbytes
        self.most = max(self.most, sum(self.held.values()))
        return made

    def free(self, number):
        del self.held[number]

    def require(self, nbytes):
        self.required.append(nbytes)


@pytest.fixture
def daemon():
    return Daemon()


@pytest.fixture
def memory(daemon):
    return SharedMemory(daemon)


def test_memory_goes_back_with_its_last_tensor(daemon, memory):
    made, (number, offset) = memory.place_empty(1000, torch.float32)
    view = made[10:].view(torch.int32)
    assert memory.locate(view) == (number, offset + 40)
    del made
    assert daemon.held == {number: 4096}
    del view
    assert not daemon.held


def test_tensors_take_the_place_of_those_before(daemon, memory):
    old = [memory.place_empty(count, torch.float32) for count in (1024, 4096, 8192)]
    places = [place for _, place in old]
    with memory.reusing():
        old.clear()
        assert len(daemon.held) == 3
        memory.require(13 * 4096)
        assert daemon.required == [0]
        first, place = memory.place_empty(3000, torch.float32)
        assert place == places[1] and not first.any()
        first.fill_(1)
        del first
        second, place = memory.place_empty(4096, torch.float32)
        assert place == places[1] and not second.any()
        assert memory.locate(second) == place
    assert daemon.made == 3 and list(daemon.held) == [places[1][0]]


def test_memory_that_fits_badly_makes_room(daemon, memory):
    """A rank never holds more than before or after."""
    old = [memory.empty(16384, torch.uint8) for _ in range(4)]
    with memory.reusing():
        old.clear()
        new = memory.empty(40000, torch.uint8)
        assert sum(daemon.held.values()) <= 4 * 16384
        small = memory.empty(100, torch.uint8)
        assert sum(daemon.held.values()) <= 4 * 16384
    assert sum(daemon.held.values()) == 40960 + 4096
    assert daemon.most == 4 * 16384
    assert new.numel() + small.numel() == 40100


# Stages: memory for what comes and goes in every step is made once.


def test_sizes_that_differ_a_little_take_the_same_memory(daemon):
    made = Stages(SimpleNamespace(connection=daemon))
    for count in (10_000, 9_000, 10_200, 8_000, 10_000):
        tensor, place = made.place(count, torch.float32)
        assert tensor.numel() == count and place == (1, 0)
        del tensor
    assert (daemon.made, len(daemon.held)) == (1, 1)


def test_memory_is_kept_as_long_as_a_view(daemon):
    made = Stages(SimpleNamespace(connection=daemon))
    tensor, _ = made.place(1000, torch.float32)
    view = tensor.view(10, 100)[3]
    del tensor
    _, place = made.place(1000, torch.float32)
    assert place == (2, 0)
    view.fill_(1.0)
    del view
    assert made.place(1000, torch.float32)[1] in ((1, 0), (2, 0)) and daemon.made == 2


def test_no_more_is_kept_than_was_in_use(daemon):
    made = Stages(SimpleNamespace(connection=daemon))
    for count in (1000, 100_000, 10_000_000):
        made.place(count, torch.uint8)
    assert daemon.made == 3 and list(daemon.held) == [2, 3]


def test_rounding():
    for nbytes in (1, 4096, 4097, 100_000, 123_456_789):
        assert nbytes <= rounded(nbytes) <= nbytes * 5 // 4 + 4096 and rounded(nbytes) % 4096 == 0
