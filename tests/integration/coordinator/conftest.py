"""A real coordinator process, and the other end of its wire: a scripted node daemon that speaks NodeService."""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from rig.coordinator.dashboards import SCRIPT, ReportingJob
from rig.ports import free_port

from bagua.base.security import TlsFiles, call_metadata, channel_credentials
from bagua.base.system_limits import await_readable
from bagua.client import Client
from bagua.proto import common_pb2, node_pb2, node_pb2_grpc

WAIT_S = 60.0
LIVE = [1, 2, 3, 4, common_pb2.JOB_STATE_WAITING]
RUNNING = {"state": common_pb2.RANK_STATE_RUNNING, "pid": 77}
DONE = {"state": common_pb2.RANK_STATE_EXITED, "pid": 77, "exited_at": 5.0}
_TESTS = itertools.count()

FAST = {
    "BAGUA_COORDINATOR_HEARTBEAT_S": "0.2",
    "BAGUA_COORDINATOR_LEASE_S": "1.5",
    "BAGUA_COORDINATOR_JOB_LEASE_S": "2",
    "BAGUA_COORDINATOR_SETTLE_S": "0.3",
    "BAGUA_COORDINATOR_FENCE_AFTER": "1.5",
}
PATIENT = {
    "BAGUA_COORDINATOR_LEASE_S": "30",
    "BAGUA_COORDINATOR_JOB_LEASE_S": "40",
    "BAGUA_COORDINATOR_FENCE_AFTER": "30",
}
"""For tests in whose process scripted nodes share the interpreter with much else: they may stand still for seconds."""


class CoordinatorProcess:
    """``python -m bagua.daemon.coordinator``, its ready line read. ``error``: why it did not start."""

    def __init__(
        self,
        state_dir,
        *arguments,
        listen="",  # a port of loopback
        descriptors=None,
        **environment,
    ):
        ready, write_end = os.pipe()
        listen = listen or f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-P", "-m", "bagua.daemon.coordinator", "--listen", listen]
        command += ["--state-dir", str(state_dir), "--ready-fd", str(write_end), "--death-signal", *arguments]
        if descriptors is not None:
            command = ["prlimit", f"--nofile={descriptors}:{descriptors}", *command]
        self.process = subprocess.Popen(
            command, pass_fds=[write_end], stderr=subprocess.PIPE, text=True, env={**os.environ, **FAST, **environment}
        )
        os.close(write_end)
        with os.fdopen(ready) as lines:
            assert await_readable([lines], WAIT_S), "no ready line"
            line = json.loads(lines.readline() or "{}")
        self.address = line.get("address", "")
        self.dashboard = line.get("dashboard", "")
        self.error = line.get("error", "")
        self.token_file = Path(line.get("token_file", "/nowhere"))
        self.tls = TlsFiles.in_folder(Path(line["tls"])) if line.get("tls") else None
        self.state_dir = state_dir
        self._errors = []
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self):
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self._errors += lines

    @property
    def token(self):
        return self.token_file.read_text()

    def client(self):
        return Client(self.address, token=self.token, tls=self.tls)

    def channel(self):
        if self.tls is None:
            return grpc.insecure_channel(self.address)
        return grpc.secure_channel(self.address, channel_credentials(self.tls))

    def end(self, number=signal.SIGTERM):
        """(exit code, stderr)."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self):
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code, "".join(self._errors)


class Peer:
    """A node daemon's end of the stream. Sends what the test says, and heartbeats by itself."""

    def __init__(self, coordinator, node_id, slots=2, boot_id="boot-1", jobs=(), heartbeat_s=0.2, hello=None, token=""):
        self.node_id = node_id
        self._outgoing = queue.SimpleQueue()
        self._incoming = queue.SimpleQueue()
        self._channel = coordinator.channel()
        self._heartbeat_s = heartbeat_s
        introduction = node_pb2.Hello(
            node_id=node_id,
            hostname=f"host-of-{node_id}",
            address="127.0.0.1",
            slots=slots,
            version="test",
            boot_id=boot_id,
            jobs=jobs,
        )
        self._outgoing.put(hello or node_pb2.NodeFact(hello=introduction))
        stub = node_pb2_grpc.NodeServiceStub(self._channel)
        self._call = stub.Session(self._facts(), metadata=call_metadata(token or coordinator.token))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _facts(self):
        while True:
            try:
                fact = self._outgoing.get(timeout=self._heartbeat_s or None)
            except queue.Empty:
                fact = node_pb2.NodeFact(heartbeat=node_pb2.Heartbeat())
            if fact is None:
                return
            yield fact

    def _read(self):
        try:
            for directive in self._call:
                self._incoming.put(directive)
        except grpc.RpcError as error:
            self._incoming.put(error)
        self._incoming.put(None)

    def send(self, fact):
        self._outgoing.put(fact)

    def next(self, timeout=WAIT_S):
        """The content of the next directive. Raises the stream's error."""
        found = self._incoming.get(timeout=timeout)
        if isinstance(found, grpc.RpcError):
            raise found
        assert found is not None, "the stream ended"
        return getattr(found, str(found.WhichOneof("directive")))

    def expect(self, kind, timeout=WAIT_S):
        found = self.next(timeout)
        assert isinstance(found, kind), f"{self.node_id} got {found}"
        return found

    def quiet(self, seconds=0.5):
        try:
            self._incoming.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def report(self, run, phase, states=None, **more):
        ranks = [
            common_pb2.RankStatus(rank=rank, node_id=self.node_id, **status) for rank, status in (states or {}).items()
        ]
        local = node_pb2.LocalJob(job_id=run.job_id, generation=run.generation, phase=phase, ranks=ranks, **more)
        self.send(node_pb2.NodeFact(job=local))

    def close(self):
        self._outgoing.put(None)
        self._call.cancel()
        self._thread.join(WAIT_S)
        self._channel.close()


def held(job, *ranks, **more):
    """A job as a daemon that comes back tells of it: its ranks run, but for what ``more`` says."""
    told = [common_pb2.RankStatus(rank=rank, **{**RUNNING, **more}) for rank in ranks]
    return node_pb2.LocalJob(job_id=job.job_id, generation=1, phase=node_pb2.LOCAL_PHASE_STARTED, ranks=told)


@pytest.fixture
def run_on(until):
    """Starts a job with ranks of one node; returns its RunJob."""

    def run(client, peer, nproc=1):
        spec = common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=nproc, placement_timeout_s=30, stop_grace_s=1)
        job = client.submit(spec)
        order = peer.expect(node_pb2.RunJob)
        peer.report(order, node_pb2.LOCAL_PHASE_STARTED, dict.fromkeys(range(nproc), RUNNING))
        until(client, job.job_id, common_pb2.JOB_STATE_RUNNING)
        return order

    return run


@pytest.fixture
def start(tmp_path):
    """Starts coordinators; those that still run at the end are stopped."""
    running = []

    def start_one(*arguments, state_dir=None, **more):
        made = CoordinatorProcess(state_dir or tmp_path / "state", *arguments, **more)
        running.append(made)
        return made

    yield start_one
    for process in running:
        if process.process.poll() is None:
            process.process.kill()
        process.wait()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """One coordinator for all tests that neither stop it nor look at all that it knows."""
    process = CoordinatorProcess(tmp_path_factory.mktemp("shared"))
    assert not process.error
    yield process
    code, errors = process.end()
    assert code == 0, errors


@pytest.fixture
def coordinator(shared):
    return shared


@pytest.fixture
def client(coordinator):
    """Its jobs are cancelled at the end. A node that comes in a later test has started anew, and holds none."""
    with coordinator.client() as made:
        yield made
        for job in made.list(states=LIVE):
            made.cancel(job.job_id)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    process = CoordinatorProcess(tmp_path_factory.mktemp("served"), "--dashboard", "127.0.0.1:0", **PATIENT)
    assert process.dashboard, process.end()
    yield process
    code, errors = process.end()
    assert code == 0, errors


@pytest.fixture(scope="module")
def peers(served):
    made = [Peer(served, name) for name in ("a", "b")]
    for peer in made:
        peer.expect(node_pb2.Welcome)
    yield made
    for peer in made:
        peer.close()


@pytest.fixture
def job(served, peers):
    """One whose name is a script, and that reports, with a straggler."""
    with served.client() as client:
        made = ReportingJob(client, peers, SCRIPT)
        yield made
        made.close()


@pytest.fixture
def connect():
    """Connects scripted nodes and waits for their Welcome. Each test has boots of its own."""
    peers, boot_id = [], f"boot-of-{next(_TESTS)}"

    def connect_one(coordinator, node_id, welcome=True, **more):
        peer = Peer(coordinator, node_id, **{"boot_id": boot_id, **more})
        peers.append(peer)
        if welcome:
            peer.expect(node_pb2.Welcome)
        return peer

    yield connect_one
    for peer in peers:
        peer.close()


@pytest.fixture
def until():
    """Waits for a job to be in a state, by watching it."""

    def wait_for(client, job_id, *states):
        deadline = time.monotonic() + WAIT_S
        for update in client.watch(job_id):
            if update.WhichOneof("update") == "job" and update.job.state in states:
                return update.job
            assert time.monotonic() < deadline
        raise AssertionError(f"ended as {client.get(job_id)}")

    return wait_for
