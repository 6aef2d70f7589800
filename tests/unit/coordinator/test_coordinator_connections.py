"""Which connections are shut down, and what is told of it. And the sockets of this very process."""

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter

import pytest

from bagua.daemon.coordinator.host.connections import Connections, OwnSockets, Refusals, Socket, parse_peer

PATIENCE = 3


class Line:
    """Keeps what would be logged."""

    def __init__(self):
        self.now = 0.0
        self.lines = []
        self.refusals = Refusals(lambda: self.now, lambda _, **values: self.lines.append(values))


class House:
    """Connections that a test opens; what is cut has gone at the next look."""

    def __init__(self, limit=8, patience=PATIENCE):
        self.open = {}
        self.log = Line()
        self.counters = Counter()
        self.door = Connections(self.look, self.cut, limit, patience, self.log.refusals, self.counters)

    def come(self, inode, address="10.0.0.1"):
        self.open[inode] = Socket(inode, inode, (address, 10_000 + inode))
        return f"ipv4:{address}:{10_000 + inode}"

    async def look(self, _):
        return list(self.open.values())

    def cut(self, connection):
        return self.open.pop(connection.inode, None) is not None

    def ticks(self, number):
        for _ in range(number):
            asyncio.run(self.door.tick())
        return set(self.open)


def test_a_stranger_is_shut_down_and_a_bearer_is_not():
    house = House()
    house.come(1)
    house.door.admitted(house.come(2))
    assert house.ticks(PATIENCE) == {1, 2}
    assert house.ticks(1) == {2}
    assert house.ticks(100) == {2}
    assert house.counters == {("connections_cut", "no_token_in_time"): 1}


def test_a_token_that_comes_late_counts_and_one_of_a_former_connection_does_not():
    house = House()
    peer = house.come(1)
    house.ticks(PATIENCE)
    house.door.admitted(peer)
    assert house.ticks(100) == {1}
    closed = house.open.pop(1)
    house.ticks(1)
    house.open[9] = Socket(9, 1, closed.peer)  # the same address and port, another connection
    assert house.ticks(PATIENCE + 1) == set()


def test_too_many_strangers_the_oldest_go_first_and_nobody_at_the_first_look():
    house = House(limit=8)
    for inode in range(20):
        house.come(inode, f"10.0.0.{inode}")
    assert len(house.ticks(1)) == 20
    house.come(20, "10.0.1.1")
    assert house.ticks(1) == set(range(12, 21))


def test_one_address_has_half_of_the_room_and_known_ones_stay():
    house = House(limit=8, patience=10)
    house.door.know(["10.9.9.9"])
    house.come(100, "10.9.9.9")
    for inode in range(10):
        house.come(inode, "10.0.0.1")
    assert house.ticks(2) == {100, 6, 7, 8, 9}
    for inode in range(10, 30):
        house.come(inode, f"10.0.2.{inode}")
    assert 100 in house.ticks(1) and 100 in house.ticks(1)
    assert len(house.open) == 8


def test_a_network_of_ipv6_counts_as_one_address():
    house = House(limit=8)
    house.come(100, "2001:db8:1::1")
    for inode in range(10):
        house.come(inode, f"2001:db8::{inode + 1:x}")
    assert house.ticks(2) == {100, 6, 7, 8, 9}


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:127.0.0.1:5678", ("127.0.0.1", 5678)),
        ("ipv6:%5B::1%5D:5678", ("::1", 5678)),
        ("ipv6:[2001:db8:0::1]:7", ("2001:db8::1", 7)),
        ("ipv6:%5Bfe80::1%252%5D:7", ("fe80::1", 7)),
        ("ipv6:%5B::ffff:1.2.3.4%5D:7", ("1.2.3.4", 7)),
        ("unix:/tmp/x", None),
        ("nonsense", None),
    ],
)
def test_peers_as_grpc_writes_them(text, peer):
    assert parse_peer(text) == peer


# ---- real sockets


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")])
def pair(request):
    """The two ends of a connection, the accepted one first, and the port."""
    family, host = request.param
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1" if host == "::" else host, port)) as there:
            here, _ = server.accept()
            with here:
                yield here, there, port


@pytest.fixture
def own():
    made = OwnSockets()
    yield made
    made.close()


def accepted(own, there):
    """The one accepted connection whose peer is ``there``. Other tests' connections may have the port of the server on
    another address.
    """
    (found,) = (each for each in own.look([]) if each.peer[1] == there.getsockname()[1])
    return found


def test_accepted_connections_are_found_and_cut(pair, own):
    here, there, port = pair
    assert own.look([]) == []
    own.watch(port)
    found = accepted(own, there)
    assert found.peer[1] == there.getsockname()[1] and found.peer[0] in ("127.0.0.1", "::1")
    assert found in own.look([found])
    before = len(os.listdir("/proc/self/fd"))
    assert own.cut(found)
    assert there.recv(1) == b"" and here.recv(1) == b""  # gRPC sees the end, and closes
    assert here.fileno() >= 0 and len(os.listdir("/proc/self/fd")) == before
    here.close()
    assert found not in own.look([found]) and not own.cut(found)


def test_a_number_that_was_given_to_another_is_not_cut(pair, own):
    here, there, port = pair
    own.watch(port)
    found = accepted(own, there)
    a, b = socket.socketpair()
    with a, b:
        number = here.detach()
        os.dup2(a.fileno(), number)
        assert not own.cut(found) and found not in own.look([found])
        b.send(b"x")
        assert a.recv(1) == b"x"
        os.close(number)
    assert there.recv(1) == b""


def test_it_works_when_no_descriptor_is_left():
    code = """
import os, resource, socket
from bagua.daemon.coordinator.host.connections import OwnSockets
server = socket.create_server(("127.0.0.1", 0))
own = OwnSockets()
own.watch(server.getsockname()[1])
there = socket.create_connection(server.getsockname())
here, _ = server.accept()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.dup(0)
except OSError:
    pass
(found,) = own.look([])
assert found.descriptor == here.fileno() and own.cut(found) and there.recv(1) == b""
print("cut")
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "cut\n", done.stderr
