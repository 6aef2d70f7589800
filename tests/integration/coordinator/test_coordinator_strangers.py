"""Callers without a token: they neither keep those out that have one, nor fill the log, nor reach a parser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

WAIT_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


@contextmanager
def silent_streams(address: str, number: int) -> Iterator[list[grpc.Call]]:
    """So many connections, each with a stream that asks nothing more and shows no token."""
    with ExitStack() as channels:
        calls = []
        for _ in range(number):
            channel = channels.enter_context(grpc.insecure_channel(address, options=CHANNEL))
            calls.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        yield calls


def ends(call: grpc.Call) -> grpc.StatusCode:
    """How a stream that is refused sooner or later ended."""
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    return call.code()


def test_silent_streams_leave_room_for_those_with_a_token(start: Callable, connect: Callable) -> None:
    """More of them than the process may open files."""
    process = start(descriptors=128, BAGUA_COORDINATOR_STRANGER_S="3")
    daemon = connect(process, "first")
    with silent_streams(process.address, 150) as calls:
        with process.client() as client:
            assert [node.node_id for node in client.nodes()] == ["first"]
            returning = connect(process, "second")
            assert {node.node_id for node in client.nodes() if node.connected} == {"first", "second"}
            for call in calls:
                assert ends(call) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert {node.node_id for node in client.nodes() if node.connected} == {"first", "second"}
    assert daemon.quiet(0) and returning.quiet(0)
    code, errors = process.end()
    assert code == 0 and "Traceback" not in errors, errors
    assert errors.count("refused") <= 2, errors
