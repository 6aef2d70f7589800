"""Engines of several hosts, on loopback: the same results, the same bits, and every way to lose a host."""

from __future__ import annotations

import collections
import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from rig.limits import SOON_S

from bagua.csrc.wire_version import WIRE_VERSION

COUNTS = [0, 1, 1003, 70_001]
CHUNK = {"chunk_bytes": 16384}  # many chunks of small vectors
LAYOUTS = {
    "one each": [[0], [1]],
    "two each": [[0, 1], [2, 3]],
    "unequal": [[0, 1, 2], [3]],
    "three hosts": [[0], [1, 2], [3]],
    "mixed ranks": [[0, 3], [1], [2, 4]],
}


SIMPLER = {"one each", "two each"}  # than the others


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full if name in SIMPLER else ()) for name in LAYOUTS]
)
def test_every_operation(make_world: Callable[..., Any], layout: str) -> None:
    world = make_world(LAYOUTS[layout], **CHUNK)
    for result in world.run("verify", counts=COUNTS).values():
        assert result["wrong"] == []
        assert result["stats"]["bytes_sent"] > 0 and result["stats"]["bytes_received"] > 0
    assert [engine.error() for engine in world.engines] == [""] * len(world.engines)


@pytest.mark.parametrize("count", [500, 70_001])
def test_all_hosts_end_with_the_same_bits(make_world: Callable[..., Any], count: int) -> None:
    digests = set()
    for _ in range(2):
        world = make_world([[0], [1, 2], [3]], **CHUNK)
        digests |= {result["digest"] for result in world.run("digest", count=count).values()}
        world.stop()
    assert len(digests) == 1


BARRIER = ["barrier", "float32", {}]
CALL = ["allreduce", "float32", {"count": 100, "shape": [10, 10], "label": "bucket 3"}]
MISMATCHES = {
    "count": (CALL, ["allreduce", "float32", {"count": 128}], "(host 1) passed 128 x float32, SUM, rank 0 (host 0)"),
    "large count": (CALL, ["allreduce", "float32", {"count": 90_000}], "(host 1) passed 90000 x float32"),
    "empty": (CALL, ["allreduce", "float32", {"count": 0}], "(host 1) passed 0 x float32"),
    "dtype": (CALL, ["allreduce", "float64", {"count": 100}], "(host 1) passed 100 x float64"),
    "kind": (CALL, ["broadcast", "float32", {"count": 100, "root": 0}], "(host 1) called broadcast with 100 x float32"),
    "root": (
        ["reduce", "float32", {"count": 8, "root": 0}],
        ["reduce", "float32", {"count": 8, "root": 1}],
        "(host 1) passed 8 x float32, SUM, root 1, rank 0 (host 0) passed 8 x float32, SUM, root 0",
    ),
    "message": (
        ["recv", "float32", {"count": 8, "root": 1}],
        ["send", "float32", {"count": 9, "root": 0}],
        "rank 1 sends 9 x float32, root 0, rank 0 expects 8 x float32, root 1",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_between_hosts_names_both(make_world: Callable[..., Any], what: str) -> None:
    one, other, text = MISMATCHES[what]
    results = make_world([[0], [1]]).run("call", calls=[[BARRIER, one], [BARRIER, other]])
    errors = [result["error"] for result in results.values()]
    assert errors[0] == errors[1], "the first error is told everywhere"
    assert text in errors[0]


def test_killed_rank_fails_all_hosts(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1], [2], [3]])
    world.connect()
    world.start("endless", count=50_000)
    world.lines()
    world.kill(2)
    killed = time.monotonic()
    for rank in (0, 1, 3):
        result = world.line(rank)
        assert "rank 2 (pid" in result["error"] and "went away without leaving" in result["error"]
        assert result["at"] - killed < SOON_S


def test_closed_host_fails_the_others(make_world: Callable[..., Any]) -> None:
    world = make_world([[0], [1], [2]])
    world.connect()
    world.start("hang", skip=1)
    world.lines()
    closed = time.monotonic()
    world.engines[1].close()
    for rank in (0, 2):
        result = world.line(rank)
        assert "host 1 (rank 1) has left the job" in result["error"]
        assert result["at"] - closed < SOON_S


def test_orderly_end_is_no_error(make_world: Callable[..., Any]) -> None:
    """One host's job is over before the other's: nobody calls that a failure."""
    world = make_world([[0], [1]])
    world.run("call", calls=[[BARRIER, CALL, BARRIER]] * 2)
    world.engines[1].close()
    time.sleep(0.3)
    assert world.engines[0].error() == ""
    assert [event["kind"] for event in world.engines[0].events()] == ["joined", "left"]


@pytest.mark.parametrize("send", [False, True])
def test_rank_that_left_is_named(make_world: Callable[..., Any], send: bool) -> None:
    world = make_world([[0, 2], [1]])
    world.connect()
    world.start("leave", who=1, send=send)
    assert world.line(1) == {}
    error = world.line(0, 5.0)["error"]
    assert "rank 1 has left the job in good order, but" in error and "needs it" in error


def test_abort_reaches_all_hosts(make_world: Callable[..., Any]) -> None:
    world = make_world([[0], [1]])
    world.connect()
    world.start("hang", skip=1)
    world.lines()
    world.engines[1].abort("rank 1 exited with code 3")
    assert world.line(0, 2.0)["error"] == "rank 1 exited with code 3 [BG502]"


def test_waiting_names_the_host(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    world = make_world([[0], [1]])
    world.connect()
    world.start("hang", skip=1)
    world.lines()
    wait_for(lambda: "all-reduce #0 of world (bucket 3)" in world.engines[0].waiting(0.01))
    assert "host 1 (rank 1) has not begun it" in world.engines[0].waiting(0.01)
    world.go_on(1)
    assert world.lines() == {0: {}, 1: {}}


def test_garbage_on_the_port(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    world = make_world([[0], [1]])
    host, port = world.engines[1].address().rsplit(":", 1)
    half_hello = struct.pack("<II", 0x48554742, 1) + bytes(20)

    def stranger(message: bytes) -> socket.socket:
        connection = socket.create_connection((host, int(port)))
        connection.sendall(message)
        return connection

    held = [stranger(b"") for _ in range(100)]
    held += [stranger(half_hello) for _ in range(10)]
    held += [stranger(secrets.token_bytes(4096)) for _ in range(10)]
    assert world.run("call", calls=[[BARRIER, CALL]] * 2) == {0: {}, 1: {}}
    wait_for(lambda: world.engines[1].stats()["bad_connections"] >= 10)
    for connection in held:
        connection.close()
    wait_for(lambda: world.engines[1].stats()["bad_connections"] >= 120)
    assert [engine.error() for engine in world.engines] == ["", ""]


@pytest.mark.parametrize(
    "first", [b"", b"B", struct.pack("<II", 0x48554742, WIRE_VERSION) + bytes(20)], ids=["", "byte", "part"]
)
def test_a_flood_from_one_address_keeps_nobody_out(make_world: Callable[..., Any], first: bytes) -> None:
    """Not even a host at that same address. Each connection of the flood was a thread for five seconds."""
    world = make_world([[0], [1]])
    host, port = world.engines[1].address().rsplit(":", 1)
    over = threading.Event()

    def flood() -> None:
        held: collections.deque[socket.socket] = collections.deque()
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
        assert world.run("call", calls=[[BARRIER, CALL]] * 2) == {0: {}, 1: {}}
    finally:
        over.set()
        stranger.join()
    assert [engine.error() for engine in world.engines] == ["", ""]


def test_wrong_job_key(make_world: Callable[..., Any]) -> None:
    world = make_world([[0], [1]], job_key=[bytes(32), b"x" * 32])
    world.connect()
    world.start("call", only=[0], calls=[[BARRIER], []])
    error = world.line(0, 10.0)["error"]
    assert "no connection to host 1 (rank 1)" in error and "does not have this job's key" in error


def test_host_that_does_not_come(make_world: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, says nothing
        world = make_world([[0], [1]], connect_timeout_s=1.0)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        world.engines[0].set_peers([world.engines[0].address(), address])
        world.start("call", only=[0], calls=[[BARRIER], []])
        error = world.line(0, 10.0)["error"]
    assert f"no connection to host 1 (rank 1) at {address}" in error


def test_addresses_that_do_not_come(make_world: Callable[..., Any]) -> None:
    world = make_world([[0], [1]], connect_timeout_s=0.5)
    world.start("call", only=[0], calls=[[BARRIER], []])
    assert "addresses of the other hosts did not come within 0.5 s" in world.line(0, 10.0)["error"]


def test_bad_addresses(make_world: Callable[..., Any]) -> None:
    world = make_world([[0], [1]])
    for addresses in (["127.0.0.1:1"], ["nonsense", "127.0.0.1:1"]):
        with pytest.raises(RuntimeError):
            world.engines[0].set_peers(addresses)
    world.connect()
    world.connect()
    with pytest.raises(RuntimeError, match="can't change"):
        world.engines[0].set_peers(["127.0.0.1:1", "127.0.0.1:2"])
