"""An engine and a host that was written anew, in Python: keys and records are what transport/README.md says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import python_host
from python_host import ACCEPTED, ENCRYPTED, PING, PLAIN_BY_CHOICE, PLAIN_ON_LOOPBACK, PONG

from bagua.daemon.node.jobs.engine_host import RefusedFrames

HOSTS = [[0], [1]]
STREAMS = 4
LANE = STREAMS


Call = Callable[..., python_host.Dialled]


@pytest.fixture
def call() -> Iterator[Call]:
    """``call(world)``: a Python host 0 calls host 1's engine."""
    made: list[python_host.Dialled] = []

    def dial(world: Any, stream: int = LANE, **more: Any) -> python_host.Dialled:
        world.engines[1].set_peers([engine.address() for engine in world.engines])
        made.append(python_host.dial(world.engines[1].address(), world.key, "test", [0, 1], stream, **more))
        return made[-1]

    yield dial
    for host in made:
        host.socket.close()


@pytest.mark.parametrize("aes", [True, False])
def test_keys_and_records(make_world: Callable[..., Any], call: Call, aes: bool) -> None:
    """A sign of life there and back, twice: both directions, and the number of each record."""
    host = call(make_world(HOSTS, encryption="always"), aes=aes)
    assert (host.protection, host.verdict) == (ENCRYPTED, ACCEPTED)
    for number in range(2):
        host.send(PING, number)
        header = host.receive()
        assert (header[2], header[4], header[9]) == (PONG, 1, number)


def broken(world: Any, wait_for: Callable[..., None]) -> str:
    wait_for(lambda: world.engines[1].error() != "", 30.0)
    assert world.engines[1].stats()["frames_refused"] <= 1
    return str(world.engines[1].error())


@pytest.mark.parametrize("attack", ["repeated", "reflected", "other stream", "left out", "other generation", "plain"])
def test_frames_out_of_place(
    make_world: Callable[..., Any], wait_for: Callable[..., None], call: Call, attack: str
) -> None:
    """Each ends the job with the name of the host; none is answered. The node's count outlasts the job's engine."""
    world = make_world(HOSTS, encryption="always")
    frames = RefusedFrames()
    frames.add(world.engines[1])
    host = call(world)
    first = host.send(PING, 0)
    assert host.receive()[2] == PONG
    words = "stream 4: what came is not what it sent"
    match attack:
        case "repeated":
            host.socket.sendall(first)
        case "reflected":
            host.send(PING, 1)
            host.socket.sendall(python_host.read(host.socket, len(first)))
        case "other stream":
            call(world, stream=0).socket.sendall(host.out.seal(python_host.plain_header(PING, 1)))
            words = "stream 0: what came is not what it sent"
        case "left out":
            host.out.nonce()
            host.send(PING, 1)
        case "other generation":
            host.send(PING, 1, generation=0)
            words = "stream 4: a frame of another generation or communicator"
        case "plain":
            host.socket.sendall(2 * python_host.plain_header(PING, 1))
    assert f"host 0 (rank 0), {words}" in broken(world, wait_for)
    wait_for(lambda: frames.total() == 1)
    frames.remove(world.engines[1])
    world.engines[1].close()
    assert frames.total() == 1


@pytest.mark.parametrize("protection", [PLAIN_ON_LOOPBACK, PLAIN_BY_CHOICE])
def test_nobody_is_talked_into_plain(
    make_world: Callable[..., Any], wait_for: Callable[..., None], call: Call, protection: int
) -> None:
    """Not even by a host that has the key."""
    world = make_world(HOSTS, encryption="always")
    host = call(world, protection=protection)
    assert host.verdict != ACCEPTED
    assert host.socket.recv(1) == b"", "the engine has closed the connection"
    wait_for(lambda: world.engines[1].stats()["bad_connections"] == 1)
