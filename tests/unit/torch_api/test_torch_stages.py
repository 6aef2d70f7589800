"""Memory for what comes and goes in every step is made once."""

from types import SimpleNamespace

import torch

from bagua.torch_api.job.stages import Stages, rounded


class Segment(bytearray):
    """Shared memory that the daemon would have made."""

    def __init__(self, nbytes, id):
        super().__init__(nbytes)
        self.nbytes, self.id = nbytes, id


class Daemon:
    """Counts what it is asked for."""

    def __init__(self):
        self.made = 0
        self.freed = []

    def alloc(self, nbytes, for_peers):
        self.made += 1
        return Segment(nbytes, self.made)

    def free(self, id):
        self.freed.append(id)


def stages():
    daemon = Daemon()
    session = SimpleNamespace(connection=daemon)
    return Stages(session), daemon


def test_sizes_that_differ_a_little_take_the_same_memory():
    made, daemon = stages()
    for count in (10_000, 9_000, 10_200, 8_000, 10_000):
        tensor, place = made.place(count, torch.float32)
        assert tensor.numel() == count and place == (1, 0)
        del tensor
    assert (daemon.made, daemon.freed) == (1, [])


def test_memory_is_kept_as_long_as_a_view():
    made, daemon = stages()
    tensor, _ = made.place(1000, torch.float32)
    view = tensor.view(10, 100)[3]
    del tensor
    _, place = made.place(1000, torch.float32)
    assert place == (2, 0)
    view.fill_(1.0)
    del view
    assert made.place(1000, torch.float32)[1] in ((1, 0), (2, 0)) and daemon.made == 2


def test_no_more_is_kept_than_was_in_use():
    made, daemon = stages()
    for count in (1000, 100_000, 10_000_000):
        made.place(count, torch.uint8)
    assert daemon.made == 3 and daemon.freed == [1]


def test_rounding():
    for nbytes in (1, 4096, 4097, 100_000, 123_456_789):
        assert nbytes <= rounded(nbytes) <= nbytes * 5 // 4 + 4096 and rounded(nbytes) % 4096 == 0
