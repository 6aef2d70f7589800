"""Strangers at the port of a host, and hosts that do not come."""

import collections
import contextlib
import socket
import struct
import threading
import time

import pytest

from bagua.csrc.wire_version import WIRE_VERSION

HOSTS = [[0], [1]]
CALLS = [[["barrier", "float32", {}], ["allreduce", "float32", {"count": 100}]]] * 2


@pytest.mark.parametrize("first", [b"", struct.pack("<II", 0x48554742, WIRE_VERSION) + bytes(20)], ids=["", "part"])
def test_a_flood_from_one_address_keeps_nobody_out(make_world, first):
    """Not even a host at that same address. Each connection of the flood was a thread for five seconds."""
    world = make_world(HOSTS)
    host, port = world.engines[1].address().rsplit(":", 1)
    over = threading.Event()

    def flood():
        held = collections.deque()
        while not over.is_set():
            held.append(socket.socket())
            with contextlib.suppress(OSError):  # the engine has closed it
                held[-1].connect((host, int(port)))
                held[-1].sendall(first)
            if len(held) > 400:
                held.popleft().close()
        for one in held:
            one.close()

    stranger = threading.Thread(target=flood)
    stranger.start()
    try:
        until = time.monotonic() + 60
        while world.engines[1].stats()["bad_connections"] < 300:  # it has no room left
            assert time.monotonic() < until
        assert world.run("call", calls=CALLS) == {0: {}, 1: {}}
    finally:
        over.set()
        stranger.join()
    assert [engine.error() for engine in world.engines] == ["", ""]


def test_host_that_does_not_come(make_world):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, says nothing
        world = make_world(HOSTS, connect_timeout_s=1.0)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        world.engines[0].set_peers([world.engines[0].address(), address])
        world.start("call", only=[0], calls=CALLS)
        error = world.line(0, 10.0)["error"]
    assert f"no connection to host 1 (rank 1) at {address}" in error


def test_addresses_that_do_not_come(make_world):
    world = make_world(HOSTS, connect_timeout_s=0.5)
    world.start("call", only=[0], calls=CALLS)
    assert "addresses of the other hosts did not come within 0.5 s" in world.line(0, 10.0)["error"]


def test_bad_addresses(make_world):
    world = make_world(HOSTS)
    for addresses in (["127.0.0.1:1"], ["nonsense", "127.0.0.1:1"]):
        with pytest.raises(RuntimeError):
            world.engines[0].set_peers(addresses)
    world.connect()
    world.connect()
    with pytest.raises(RuntimeError, match="can't change"):
        world.engines[0].set_peers(["127.0.0.1:1", "127.0.0.1:2"])
