"""A job never runs twice: a real coordinator gives up a real daemon only when that one's ranks are gone."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from rig.relay import Relay

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


class Cluster:
    """A coordinator, a daemon behind a relay, and a client."""

    def __init__(self, folder):
        self.folder, self._programs, self._job = folder, [], ""
        ready = self.start("coordinator", "--listen", "127.0.0.1:0", "--fence-after", f"{FENCE_S}", **TIMES)
        self.relay = Relay(ready["address"])
        self.start("node", "--name", "n", "--node-id", "n", "--slots", "2", "--coordinator", self.relay.address)
        self.coordinator, self.daemon = self._programs
        self.client = Client(ready["address"], token=(folder / "token").read_text())

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

    def run(self):
        """(id of a job of two ranks, their processes), once they compute. The one before is over."""
        if self._job:
            self.client.cancel(self._job)
            self.until(self._job, lambda job: job.state >= common_pb2.JOB_STATE_SUCCEEDED)
        (self.folder / "tick.py").write_text(TICK)
        (self.folder / "ticks").unlink(missing_ok=True)
        spec = common_pb2.JobSpec(
            entry=str(self.folder / "tick.py"),
            args=[str(self.folder / "ticks")],
            workdir=str(self.folder),
            nnodes=1,
            nproc_per_node=2,
            placement_timeout_s=60.0,
            stop_grace_s=1.0,
        )
        self._job = job_id = self.client.submit(spec).job_id
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


@pytest.fixture(scope="module")
def shared():
    with tempfile.TemporaryDirectory(prefix="bg-") as folder:  # short: paths of Unix sockets are limited
        made = Cluster(Path(folder))
        yield made
        made.close()


@pytest.fixture
def cluster(shared):
    """The cluster of this file; ``said`` returns the lines of its daemons from now on."""
    log = shared.folder / "node.log"
    before = len(log.read_text())
    shared.said = lambda: log.read_text()[before:]
    return shared


@pytest.mark.parametrize("fault", ["black hole", "stopped daemon"])
def test_ranks_are_gone_before_their_job_has_ended(cluster, fault):
    job_id, ranks = cluster.run()
    if fault == "black hole":
        cluster.relay.cut(silent=True)
    else:
        os.kill(daemon_pid(cluster.daemon.pid), signal.SIGSTOP)
    job = cluster.until(job_id, lambda job: job.state >= common_pb2.JOB_STATE_SUCCEEDED)
    alive = [rank.pid for rank in ranks if computes(rank)]
    assert job.state == common_pb2.JOB_STATE_FAILED
    assert "has not been heard of for 2 s" in job.reason
    assert not alive, "these ranks compute on after their job FAILED"
    ticks = cluster.ticks()
    if fault == "black hole":
        cluster.relay.heal()
    else:
        os.kill(daemon_pid(cluster.daemon.pid), signal.SIGCONT)
    again, others = cluster.run()
    assert again != job_id and all(computes(rank) for rank in others)
    assert set(ticks.split()) == {str(rank.pid) for rank in ranks}
    node = cluster.said()
    assert "could not reach the coordinator for 3 s" in node or "could not renew its lease" in node


@pytest.mark.parametrize("who", ["everything", "the node"])
def test_who_stood_still_looks_at_the_facts(cluster, who):
    """A cluster that was stopped for longer than a fence goes on. Ranks of a node that was given up do not."""
    job_id, ranks = cluster.run()
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
    assert "ranks are held" in cluster.said()


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
