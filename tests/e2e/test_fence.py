"""A job never runs twice: a real coordinator gives up a real daemon only when that one's ranks are gone."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from rig.ports import free_port

from bagua.base.daemon_process import daemon_pid
from bagua.base.errors import ServiceError
from bagua.base.machine_clock import STANDSTILL_S
from bagua.cli.faults.postgres import Postgres
from bagua.client import Client
from bagua.proto import common_pb2

DEADLINE_S = 120.0
LEASE_S, FENCE_S = 2, 3
TIMES = {"BAGUA_COORDINATOR_HEARTBEAT_S": "0.3", "BAGUA_COORDINATOR_LEASE_S": f"{LEASE_S}"}
TICK = """
import os, sys, time
while True:
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.02)
"""


class Relay:
    """Passes bytes between daemons and a coordinator, until it is told to pass nothing any more."""

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.passes = threading.Event()
        self.passes.set()
        self._pairs = {}
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        self._waker.send(b"x")
        self._thread.join()
        for end in (*self._pairs, self._server, self._wake, self._waker):
            end.close()

    def silence(self, silent):
        """While silent, connections stay open, and nothing passes."""
        self.passes.clear() if silent else self.passes.set()
        self._waker.send(b"w")

    def cut(self):
        """Connections break; new ones are as before."""
        self._waker.send(b"c")

    def _run(self):
        while True:
            watched = [self._wake, *((self._server, *self._pairs) if self.passes.is_set() else ())]
            ready = select.select(watched, [], [])[0]
            if self._wake in ready:
                asked = self._wake.recv(100)
                if b"x" in asked:
                    return
                if b"c" in asked:
                    for end in self._pairs:
                        end.close()
                    self._pairs.clear()
                continue
            for end in ready:
                with contextlib.suppress(OSError):
                    self._serve(end)

    def _serve(self, end):
        if end is self._server:
            here = self._server.accept()[0]
            there = socket.create_connection(self._target)
            self._pairs.update({here: there, there: here})
        elif end in self._pairs:
            data = b""
            with contextlib.suppress(OSError):
                data = end.recv(65536)
            if data:
                self._pairs[end].sendall(data)
            else:
                other = self._pairs.pop(end)
                del self._pairs[other]
                end.close()
                other.close()


class Cluster:
    """A coordinator, a daemon behind a relay, and a client."""

    def __init__(self, folder, relay=True, database="", fence_s=FENCE_S):
        self.folder = folder
        self._programs = []
        self._options = ["--fence-after", f"{fence_s}", *(["--database-url", database] if database else [])]
        ready = self.coordinate(f"127.0.0.1:{free_port()}")
        self.relay = Relay(ready["address"])
        address = self.relay.address if relay else ready["address"]
        self.start("node", "--name", "n", "--node-id", "n", "--slots", "2", "--coordinator", address)
        self.coordinator, self.daemon = self._programs
        self.client = Client(ready["address"], token=(folder / "token").read_text())

    def coordinate(self, listen):
        return self.start("coordinator", "--listen", listen, *self._options, **TIMES)

    def start(self, program, *options, **environment):
        reader, writer = os.pipe()
        command = [sys.executable, "-P", "-m", f"bagua.daemon.{program}", "--state-dir", str(self.folder)]
        with (self.folder / f"{program}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--ready-fd", str(writer), *options],
                pass_fds=[writer],
                stderr=log,
                env={**os.environ, **environment},
            )
        self._programs.append(process)
        os.close(writer)
        with os.fdopen(reader) as lines:
            assert select.select([lines], [], [], DEADLINE_S)[0], f"no ready line from {program}"
            return json.loads(lines.readline())

    def run(self, script, **spec):
        """(id of a job of two ranks, their processes), once they compute."""
        (self.folder / "tick.py").write_text(script)
        (self.folder / "ticks").unlink(missing_ok=True)
        spec = common_pb2.JobSpec(
            entry=str(self.folder / "tick.py"),
            args=[str(self.folder / "ticks")],
            workdir=str(self.folder),
            nnodes=1,
            nproc_per_node=2,
            placement_timeout_s=60.0,
            stop_grace_s=1.0,
            **spec,
        )
        job_id = self.client.submit(spec).job_id
        job = self.until(job_id, lambda job: job.state == common_pb2.JOB_STATE_RUNNING)
        until(lambda: len(set(self.ticks().split())) == 2)
        return job_id, [psutil.Process(rank.pid) for rank in job.ranks]

    def ticks(self):
        path = self.folder / "ticks"
        return path.read_text() if path.exists() else ""

    def until(self, job_id, condition):
        found = []

        def look():
            found[:] = [self.client.get(job_id)]
            return condition(found[0])

        until(look)
        return found[0]

    def close(self):
        self.client.close()
        for program in reversed(self._programs):
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(signal.SIGCONT)
                program.kill()
            program.wait()
        self.relay.close()


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def computes(process):
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def cluster():
    with tempfile.TemporaryDirectory(prefix="bg-") as folder:  # short: paths of Unix sockets are limited
        made = Cluster(Path(folder))
        yield made
        made.close()


@pytest.mark.parametrize("fault", ["black hole", "stopped daemon"])
def test_ranks_are_gone_before_their_job_has_ended(cluster, fault):
    job_id, ranks = cluster.run(TICK)
    if fault == "black hole":
        cluster.relay.silence(True)
    else:
        os.kill(daemon_pid(cluster.daemon.pid), signal.SIGSTOP)
    job = cluster.until(job_id, lambda job: job.state >= common_pb2.JOB_STATE_SUCCEEDED)
    alive = [rank.pid for rank in ranks if computes(rank)]
    assert job.state == common_pb2.JOB_STATE_FAILED
    assert "has not been heard of for 2 s" in job.reason
    assert not alive, "these ranks compute on after their job FAILED"
    ticks = cluster.ticks()
    if fault == "black hole":
        cluster.relay.silence(False)
    else:
        os.kill(daemon_pid(cluster.daemon.pid), signal.SIGCONT)
    again, others = cluster.run(TICK)
    assert again != job_id and all(computes(rank) for rank in others)
    assert set(ticks.split()) == {str(rank.pid) for rank in ranks}
    node = (cluster.folder / "node.log").read_text()
    assert "could not reach the coordinator for 3 s" in node or "could not renew its lease" in node


@pytest.mark.parametrize("who", ["everything", "the node"])
def test_who_stood_still_looks_at_the_facts(cluster, who):
    """A cluster that was stopped for longer than a fence goes on. Ranks of a node that was given up do not."""
    job_id, ranks = cluster.run(TICK)
    node = psutil.Process(cluster.daemon.pid)
    asleep = [node, *node.children(recursive=True), *([] if who == "the node" else [cluster.coordinator])]
    for process in asleep:
        os.kill(process.pid, signal.SIGSTOP)
    if who == "the node":
        cluster.until(job_id, lambda job: job.state >= common_pb2.JOB_STATE_SUCCEEDED)
    else:
        time.sleep(2 * FENCE_S + STANDSTILL_S)
    ticks = len(cluster.ticks())
    for process in asleep:
        os.kill(process.pid, signal.SIGCONT)
    if who == "the node":
        until(lambda: not any(map(computes, ranks)))
    else:
        goes_on(cluster, job_id, ranks)
        until(lambda: len(cluster.ticks()) > ticks)
    assert "ranks are held" in (cluster.folder / "node.log").read_text()


@pytest.fixture
def postgres():
    try:
        server = Postgres()
    except ServiceError as error:
        pytest.skip(f"PostgreSQL: {error}")
    yield server
    server.close()


def goes_on(cluster, job_id, ranks):
    """The job, once the node is connected again."""
    until(lambda: [node.connected for node in cluster.client.nodes()] == [True])
    time.sleep(2 * LEASE_S)
    assert cluster.client.get(job_id).state == common_pb2.JOB_STATE_RUNNING
    assert all(computes(rank) for rank in ranks)


@pytest.mark.full  # integration/node/test_node_jobs.py: a job does not notice it
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_coordinator_that_is_away_ends_nothing(database, request):
    """Killed, and away for longer than a daemon without word waits: jobs don't notice."""
    url = request.getfixturevalue("postgres").url if database == "postgresql" else ""
    with (
        tempfile.TemporaryDirectory(prefix="bg-") as folder,
        contextlib.closing(Cluster(Path(folder), relay=False, database=url)) as cluster,
    ):
        job_id, ranks = cluster.run(TICK)
        if url:
            time.sleep(FENCE_S)  # so that an acknowledgement tells what it has found since
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        time.sleep(2 * FENCE_S)
        assert all(computes(rank) for rank in ranks)
        cluster.coordinate(cluster.client.address)
        goes_on(cluster, job_id, ranks)


@pytest.mark.full  # integration/coordinator/test_coordinator_outage.py: a stream begins while the database is away
@pytest.mark.parametrize("lost", ["the daemon", "its connection"])
def test_a_database_that_is_away_ends_nothing(postgres, lost):
    """For longer than a daemon without word waits. Meanwhile the daemon is killed, or its connection breaks. The next
    daemon has started before its lease is over, on a slow machine, too."""
    with (
        tempfile.TemporaryDirectory(prefix="bg-") as folder,
        contextlib.closing(Cluster(Path(folder), database=postgres.url, fence_s=4 * FENCE_S)) as cluster,
    ):
        job_id, ranks = cluster.run(TICK, elastic=True)
        postgres.kill()
        if lost == "the daemon":
            os.kill(daemon_pid(cluster.daemon.pid), signal.SIGKILL)
        else:
            cluster.relay.cut()
        time.sleep(8 * FENCE_S)
        assert all(computes(rank) for rank in ranks), (cluster.folder / "node.log").read_text()
        assert "waits for its database" in (cluster.folder / "node.log").read_text()
        postgres.start()
        goes_on(cluster, job_id, ranks)
