"""Operations that are held back until all their members have begun them."""

import math
import threading
import time

import pytest

from bagua.base.errors import CommunicationError
from bagua.torch_api.cuda.gate import Gate


class Host:
    """Barriers that are over when the test says so; their tickets count from 1."""

    kinds, dtypes = {"barrier": 0}, {"uint8": 6}
    first_warning_s = 60.0

    def __init__(self):
        self.submitted = []  # communicators, by ticket
        self.over = set()
        self.failed = set()
        self.abandoned = []
        self.limit = math.inf

    def submit(self, request):
        self.submitted.append(request["comm"])
        return len(self.submitted)

    def done(self, ticket):
        if ticket in self.failed:
            raise CommunicationError("rank 1 was lost")
        return ticket in self.over

    def wait(self, ticket):
        self.done(ticket)

    def abandon(self, ticket):
        self.abandoned.append(ticket)

    def go_on(self, waited):
        if waited >= self.limit:
            raise CommunicationError("gave up")
        return self.first_warning_s


class Rig:
    def __init__(self):
        self.host = Host()
        self.abandoned = []
        host = self.host
        self.gate = Gate(host, self.abandoned.append)
        self.handed = []

    def submit(self, name, comm=1, hand_over=None):
        def hand():
            self.handed.append(name)
            return len(self.handed) if hand_over is None else hand_over()

        request = {"comm": comm}
        return self.gate.submit(request, hand)


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.gate.close()


def eventually(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def never(_):
    return False


def test_nothing_is_handed_over_before_all_have_begun(rig):
    number = rig.submit("a")
    time.sleep(0.05)
    assert number < 0 and not rig.handed and not rig.gate.done(number, never)
    rig.host.over.add(1)
    eventually(lambda: rig.handed == ["a"])
    assert rig.gate.await_ticket(number) == 1


def test_operations_of_a_communicator_keep_their_order(rig):
    for name, comm in (("a", 1), ("b", 1), ("c", 2)):
        rig.submit(name, comm)
    rig.host.over.update({2, 3})
    eventually(lambda: rig.handed == ["c"])
    time.sleep(0.02)
    assert rig.handed == ["c"]
    rig.host.over.add(1)
    eventually(lambda: rig.handed == ["c", "a", "b"])


def test_the_one_who_waits_gets_the_error(rig):

    def refused():
        raise CommunicationError("this stream is being captured")

    first, second = rig.submit("a", hand_over=refused), rig.submit("b", 2)
    rig.host.over.add(1)
    rig.host.failed.add(2)
    for number, words in ((first, "captured"), (second, "rank 1 was lost")):
        eventually(lambda number=number: rig.gate.done(number, never))
        with pytest.raises(CommunicationError, match=words):
            rig.gate.await_ticket(number)
    assert rig.handed == ["a"]


def test_members_have_changed(rig):
    """All that is held is dropped, but for the one that is being handed over; later ones go on."""
    enter, leave = threading.Event(), threading.Event()

    def slow():
        enter.set()
        assert leave.wait(30)
        raise CommunicationError("aborted")

    under_way, held = rig.submit("a", hand_over=slow), rig.submit("b", 2)
    rig.host.over.add(1)
    assert enter.wait(30)
    rig.gate.drop(CommunicationError("members have changed"))
    leave.set()
    with pytest.raises(CommunicationError, match="members have changed"):
        rig.gate.await_ticket(held)
    with pytest.raises(CommunicationError, match="aborted"):
        rig.gate.await_ticket(under_way)
    assert rig.host.abandoned == [2]
    number = rig.submit("c")
    rig.host.over.update({2, 3})
    assert rig.gate.await_ticket(number) == 2 and rig.handed == ["a", "c"]
