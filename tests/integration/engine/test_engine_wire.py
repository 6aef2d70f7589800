"""An engine and a host that was written anew, in Python: keys and records are what transport/README.md says."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import python_host
from python_host import ACCEPTED, ENCRYPTED, PING, PONG

from bagua.daemon.node.jobs.engine_host import RefusedFrames

LANE = 4  # behind the streams


@pytest.fixture
def call(make_world):
    """``call(...)``: an engine, and a Python host 0 that has called it."""
    made = []

    def dial(**more):
        world = make_world([[0], [1]], encryption="always")
        world.engines[1].set_peers([engine.address() for engine in world.engines])
        made.append(python_host.dial(world.engines[1].address(), world.key, "test", [0, 1], LANE, **more))
        return world.engines[1], made[-1]

    yield dial
    for host in made:
        host.socket.close()


@pytest.mark.parametrize("aes", [True, False])
def test_keys_and_records(call, aes):
    """A sign of life there and back, twice: both directions, and the number of each record."""
    _, host = call(aes=aes)
    assert (host.protection, host.verdict) == (ENCRYPTED, ACCEPTED)
    for number in range(2):
        host.send(PING, number)
        header = host.receive()
        assert (header[2], header[4], header[9]) == (PONG, 1, number)


def test_a_repeated_frame(wait_for, call):
    """It ends the job with the name of the host, and is not answered. The node's count outlasts the job's engine."""
    engine, host = call()
    frames = RefusedFrames()
    frames.add(engine)
    first = host.send(PING, 0)
    assert host.receive()[2] == PONG
    host.socket.sendall(first)
    wait_for(lambda: engine.error() != "", 30.0)
    assert "host 0 (rank 0), stream 4: what came is not what it sent" in engine.error()
    wait_for(lambda: frames.total() == 1)
    frames.remove(engine)
    engine.close()
    assert frames.total() == 1
