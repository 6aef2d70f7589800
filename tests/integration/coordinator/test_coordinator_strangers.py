"""Callers without a token: they neither keep those out that have one, nor fill the log, nor reach a parser."""

import os
import queue
import socket
import threading
import urllib.request
from contextlib import ExitStack, contextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rig.ports import free_port

from bagua.base.errors import InvalidRequestError
from bagua.base.security import call_metadata
from bagua.proto import common_pb2, job_pb2, job_pb2_grpc

WAIT_S = 60.0
CUT = grpc.StatusCode.UNAVAILABLE  # the connection was shut down
SERVING = health_pb2.HealthCheckResponse.SERVING
CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


@contextmanager
def silent_streams(address, number):
    """Opens ``number`` connections, each with a stream that asks nothing more and shows no token."""
    with ExitStack() as channels:
        calls = []
        for _ in range(number):
            channel = channels.enter_context(grpc.insecure_channel(address, options=CHANNEL))
            calls.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        yield calls


def ends(call):
    """How a stream that is refused sooner or later ended."""
    with suppress(grpc.RpcError):
        for _ in call:
            pass
    return call.code()


def test_silent_streams_leave_room_for_those_with_a_token(start, connect):
    """More of them than the process may open files."""
    process = start(descriptors=128, BAGUA_COORDINATOR_STRANGER_S="3")
    daemon = connect(process, "first")
    with silent_streams(process.address, 150) as calls:
        with process.client() as client:
            assert [node.node_id for node in client.nodes()] == ["first"]
            returning = connect(process, "second")
            assert {node.node_id for node in client.nodes() if node.connected} == {"first", "second"}
            for call in calls:
                assert ends(call) in (CUT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
            assert {node.node_id for node in client.nodes() if node.connected} == {"first", "second"}
    assert daemon.quiet(0) and returning.quiet(0)
    code, errors = process.end()
    assert code == 0 and "Traceback" not in errors, errors
    assert errors.count("refused") <= 2, errors


def test_bytes_of_strangers_are_not_parsed(shared):
    """Neither those of a body that is no message nor those of one that never ends."""
    with shared.channel() as channel:
        for method in ("SubmitJob", "ListJobs", "WatchJob", "FindJob"):
            call = channel.unary_unary(f"/bagua.v1.JobService/{method}", request_serializer=bytes)
            for body in (b"\xff" * 1000, os.urandom(3 << 20)):
                with pytest.raises(grpc.RpcError) as caught:
                    call(body, timeout=30)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "send the token of this coordinator" in caught.value.details()
        call = channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=bytes)
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            call(b"\xff" * 1000, timeout=30)


def test_a_body_that_never_comes_is_refused_at_once(shared):
    with shared.channel() as channel:
        call = channel.stream_unary("/bagua.v1.JobService/SubmitJob", request_serializer=bytes)
        never = queue.SimpleQueue()
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            call(iter(never.get, b""), timeout=30)
        never.put(b"")


def test_bytes_that_are_no_message_are_answered_in_words(shared):
    metadata = call_metadata(shared.token)
    with shared.channel() as channel:
        for path in ("JobService/SubmitJob", "JobService/WatchJob", "NodeService/Session"):
            make = channel.stream_stream if path.endswith("Session") else channel.unary_unary
            call = make(f"/bagua.v1.{path}", request_serializer=bytes)
            body = b"\xff" * 1000
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([body]) if path.endswith("Session") else body, metadata=metadata, timeout=30))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "its bytes are no message of this method" in caught.value.details()


def test_numbers_that_no_database_takes_are_refused(client):
    job = client.submit(common_pb2.JobSpec(entry="t.py", nnodes=9, nproc_per_node=1, placement_timeout_s=60))
    for call in (client.events, client.watch):
        with pytest.raises(InvalidRequestError, match=f"after_seq is {2**63}: {2**63 - 1} is the limit"):
            list(call(job.job_id, 2**63))
    assert list(client.events(job.job_id, 2**63 - 1)) == []


def test_watching_strangers_are_few_and_keep_no_probe_out(start):
    """All on one connection, which bounds of connections don't see. They would last longer than the test."""
    process = start(BAGUA_COORDINATOR_STRANGER_S="1000")
    with process.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        calls = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(80)]
        ended = queue.Queue()
        for call in calls:  # the server may take them in another order
            threading.Thread(target=lambda call=call: ended.put(ends(call)), daemon=True).start()
        assert {ended.get(timeout=WAIT_S) for _ in range(16)} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert ended.empty()
        with process.channel() as probe:
            answer = health_pb2_grpc.HealthStub(probe).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == SERVING
        for call in calls:
            call.cancel()


def test_refusals_are_a_line_and_a_count(start):
    port = free_port()
    process = start("--metrics-port", str(port), BAGUA_COORDINATOR_STRANGER_S="1")
    with process.channel() as channel:
        stub = job_pb2_grpc.JobServiceStub(channel)
        for _ in range(300):
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                stub.ListJobs(job_pb2.ListJobsRequest(), timeout=30)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert 'bagua_coordinator_bad_calls_total{kind="unauthenticated"} 300.0' in answer.read().decode()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as silent:
        assert silent.recv(1) == b""  # is shut down, too
    code, errors = process.end()
    lines = [line for line in errors.splitlines() if "refused" in line]
    assert code == 0 and 1 <= len(lines) <= 2 and "127.0.0.1" in lines[0], errors
    assert len(errors) < 5_000, errors


def test_bearers_over_tls_stay_and_strangers_of_the_handshake_go(start, connect):
    process = start("--auto-tls", "127.0.0.1", BAGUA_COORDINATOR_STRANGER_S="1")
    daemon = connect(process, "a")
    host, port = process.address.split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as garbage, suppress(ConnectionError):
            garbage.sendall(b"no handshake" * 20)
            garbage.recv(1)
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as silent:
        assert silent.recv(1) == b""
    with process.client() as client:
        assert [node.connected for node in client.nodes()] == [True]
    assert daemon.quiet(0)
    code, errors = process.end()
    assert code == 0 and "andshake" not in errors, errors  # a line for each would be as many as strangers like
