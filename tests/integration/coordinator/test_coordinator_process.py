"""The coordinator as a process: how it starts, what it refuses, and what it does with garbage."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rig.ports import free_port
from rig.system.prometheus import check_metrics, families_in

from bagua.base.errors import ConfigError, UnauthenticatedError, UnavailableError
from bagua.base.security import call_metadata
from bagua.base.system_limits import await_readable
from bagua.client import Client, find_reach
from bagua.daemon.coordinator.host import metrics
from bagua.proto import common_pb2 as c
from bagua.proto import job_pb2, job_pb2_grpc

# ---- settings that can't work: exit code 2 and one line


def refused(process):
    code, errors = process.wait()
    assert code == 2
    assert process.error, errors
    assert errors.splitlines()[-1] == f"error: {process.error}"
    assert "Traceback" not in errors
    return process.error


def test_a_port_in_use_is_named(start, shared, tmp_path):
    error = refused(start(listen=shared.address, state_dir=tmp_path / "other"))
    assert f"Can't listen on {shared.address}: the port is in use" in error and "--listen" in error


def test_a_second_coordinator_on_a_state_folder_is_refused(start, coordinator):
    error = refused(start(state_dir=coordinator.state_dir))
    assert f"Another coordinator (process {coordinator.process.pid}) uses the state folder" in error


def test_a_state_folder_that_can_not_be_written_is_named(start, tmp_path):
    (tmp_path / "file").touch()
    error = refused(start(state_dir=tmp_path / "file" / "state"))
    assert "can't be written" in error and "--state-dir" in error


def test_beyond_loopback_without_tls_is_refused_with_the_way_out(start):
    error = refused(start(listen="[::]:0"))
    assert "without TLS" in error and "bagua certs" in error


def test_a_database_that_is_away_is_no_bad_setting(start):
    """After code 2 systemd makes no other start: a machine that starts before its database would stay without one."""
    process = start("--database-url", "postgresql://bagua@127.0.0.1:1/bagua")
    code, errors = process.wait()
    assert code == 1 and "127.0.0.1:1/bagua does not answer" in process.error, errors


# ---- how it ends


def test_it_ends_with_its_parent(tmp_path):
    options = f"--listen 127.0.0.1:0 --state-dir {tmp_path} --death-signal"
    command = f"{sys.executable} -P -m bagua.daemon.coordinator {options} & echo $!; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        while not (tmp_path / "coordinator" / "coordinator.json").exists():  # it serves
            assert not await_readable([child], 0.05)
        parent.kill()
    with os.fdopen(child) as handle:
        assert await_readable([handle.fileno()], 10.0), "the coordinator outlives its parent"


def test_it_ends_when_idle(start, connect):
    process = start("--exit-when-idle", "0.3")
    time.sleep(0.6)
    assert process.process.poll() is None  # no node was there yet
    peer = connect(process, "a")
    with process.client() as client:
        job = client.submit(c.JobSpec(entry="t.py", nnodes=5, nproc_per_node=1, placement_timeout_s=60))
        peer.close()
        time.sleep(0.6)
        assert process.process.poll() is None  # a job waits
        client.cancel(job.job_id)
    assert process.wait()[0] == 0


def test_what_it_writes_is_private(shared):
    for path in (shared.state_dir, shared.state_dir / "coordinator"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert shared.token_file.stat().st_mode & 0o777 == 0o600
    published = json.loads((shared.state_dir / "coordinator" / "coordinator.json").read_text())
    assert published["address"] == shared.address and published["pid"] == shared.process.pid


def test_the_client_finds_the_coordinator_of_this_user(shared, monkeypatch):
    for name in ("BAGUA_COORDINATOR", "BAGUA_TOKEN", "BAGUA_TOKEN_FILE", "BAGUA_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BAGUA_STATE_DIR", str(shared.state_dir))
    with Client() as client:
        assert client.address == shared.address
        client.list()


# ---- who may call


def test_calls_without_the_token_are_refused_with_words(shared):
    with shared.channel() as channel:
        stub = job_pb2_grpc.JobServiceStub(channel)
        for shown in (None, "Bearer wrong", "Basic x"):
            how = {"metadata": shown and (("authorization", shown),), "timeout": 10}
            with pytest.raises(grpc.RpcError, match="send the token of this coordinator") as caught:
                stub.ListJobs(job_pb2.ListJobsRequest(), **how)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                list(stub.WatchJob(job_pb2.WatchJobRequest(job_id="x"), **how))


def test_the_client_says_what_is_wrong(shared):
    with Client(shared.address, token="wrong") as client, pytest.raises(UnauthenticatedError, match="BAGUA_TOKEN"):
        client.list()
    with Client("127.0.0.1:1", token="x") as client:
        with pytest.raises(UnavailableError, match=r"No coordinator answers at 127\.0\.0\.1:1 .*`bagua coordinator`"):
            client.list()
        with pytest.raises(UnavailableError):
            list(client.watch("job", patience_s=0.3))
    with pytest.raises(ConfigError, match="without TLS"):
        Client("192.0.2.1:7670", token="x")


def test_a_submission_that_failed_is_not_made_again():
    """The coordinator may have done it: whoever has a key can submit once more."""
    calls = []

    def refuse(request, context):
        calls.append(request)
        context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")

    methods = {"SubmitJob": grpc.unary_unary_rpc_method_handler(refuse)}
    handler = grpc.method_handlers_generic_handler("bagua.v1.JobService", methods)
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}", token="x") as client:
        with pytest.raises(UnavailableError, match="the answer was lost"):
            client.submit(c.JobSpec(entry="x", nnodes=1, nproc_per_node=1))
    server.stop(None).wait()
    assert len(calls) == 1


def test_health_is_open_and_reflection_is_not(shared):
    with shared.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "bagua.v1.JobService", "bagua.v1.NodeService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        every = channel.unary_unary("/grpc.health.v1.Health/List", bytes, bytes)
        with pytest.raises(grpc.RpcError) as refused:
            every(b"", timeout=10)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            list(reflection.ServerReflectionInfo(iter([request]), timeout=10))
        metadata = call_metadata(shared.token)
        answer = next(reflection.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=10))
        names = {service.name for service in answer.list_services_response.service}
        assert {"bagua.v1.JobService", "bagua.v1.NodeService", "grpc.health.v1.Health"} <= names


# ---- garbage


def test_garbage_closes_the_connection_and_nothing_else(shared, client):
    host, port = shared.address.split(":")
    for garbage in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536), b"PRI * HTTP/2.0\r\n"):
        with socket.create_connection((host, int(port)), timeout=20) as connection, suppress(ConnectionResetError):
            connection.sendall(garbage)
            while connection.recv(65536):
                pass
        client.list()


def test_an_oversized_message_is_refused(shared, client):
    size = 20 << 20
    metadata = call_metadata(shared.token)
    with shared.channel() as channel:
        call = channel.unary_unary("/bagua.v1.JobService/SubmitJob", request_serializer=bytes)
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            call(b"\x0a" + b"\0" * size, metadata=metadata, timeout=30)
        call = channel.stream_stream("/bagua.v1.NodeService/Session", request_serializer=bytes)
        with pytest.raises(grpc.RpcError):
            list(call(iter([b"\0" * size]), metadata=metadata, timeout=30))
    client.nodes()


# ---- TLS and metrics


def test_mutual_tls_on_all_interfaces(start, monkeypatch):
    """test_coordinator_rotation.py has certificates of another authority."""
    process = start("--auto-tls", "localhost", listen="0.0.0.0:0")
    assert process.tls is not None
    assert process.tls.key.stat().st_mode & 0o777 == 0o600
    with process.client() as client:
        client.list()
    with Client(process.address, token=process.token) as client, pytest.raises(UnavailableError):
        client.list()
    monkeypatch.setenv("BAGUA_STATE_DIR", str(process.state_dir))
    monkeypatch.delenv("BAGUA_COORDINATOR", raising=False)
    reach = find_reach()
    assert (reach.address, reach.tls) == (process.address, process.tls)
    before = process.tls.cert.read_bytes()
    process.end()
    again = start("--auto-tls", "localhost")  # daemons hold copies of the certificates: they are kept
    assert again.tls is not None and again.tls.cert.read_bytes() == before


def test_metrics_on_request(start, connect):
    port = free_port()
    process = start("--metrics-port", str(port))
    connect(process, "a")
    with process.client() as client:
        client.submit(c.JobSpec(entry="t.py", nnodes=5, nproc_per_node=1, placement_timeout_s=60))
    with Client(process.address, token="wrong") as client, pytest.raises(UnauthenticatedError):
        client.list()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "bagua_coordinator_nodes_connected 1.0" in text
    assert 'bagua_coordinator_jobs{state="pending"} 1.0' in text
    assert 'bagua_coordinator_rpcs_total{method="/bagua.v1.JobService/SubmitJob"} 1.0' in text
    assert 'bagua_coordinator_bad_calls_total{kind="unauthenticated"} 1.0' in text
    assert "bagua_coordinator_transaction_seconds_total" in text and 'state="pending"} 1.0' in text
    assert families_in(text) == {family.name for family in metrics.FAMILIES}
    check_metrics(text)
    assert process.end()[0] == 0
