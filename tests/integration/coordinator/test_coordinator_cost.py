"""Processor time of the coordinator for many jobs and hosts has a budget, so that no quadratic cost comes back.

Processor time of the coordinator's process alone, with simulated daemons in another one; the budgets are several times
what it takes, and a part of what it took when each fact looked at everything. ``tests/bench/control_plane.py`` has
larger cases and times."""

import time

import psutil
import pytest
from rig.coordinator.fleet import FleetProcess

from bagua.proto import common_pb2

HOSTS = 120
RANKS = 8
WIDE_BUDGET_S = 2.0


def spec(entry, nnodes=1, nproc=1):
    return common_pb2.JobSpec(
        entry=entry, no_python=True, nnodes=nnodes, nproc_per_node=nproc, placement_timeout_s=3600.0, stop_grace_s=5.0
    )


def cpu_s(process):
    times = process.cpu_times()
    return float(times.user + times.system)


def ended(client, job_id, deadline_s=120.0):
    deadline = time.monotonic() + deadline_s
    for update in client.watch(job_id):
        if update.WhichOneof("update") == "job" and update.job.state >= common_pb2.JOB_STATE_SUCCEEDED:
            return int(update.job.state)
        assert time.monotonic() < deadline, update
    raise AssertionError


@pytest.fixture
def coordinator(start):
    """With the usual clocks: those of other tests beat ten times as often."""
    times = {"HEARTBEAT_S": "2", "LEASE_S": "20", "JOB_LEASE_S": "20", "FENCE_AFTER": "20"}
    return start(**{f"BAGUA_COORDINATOR_{name}": value for name, value in times.items()})


def test_a_wide_job_runs_and_is_cancelled(coordinator, client):
    process = psutil.Process(coordinator.process.pid)
    with FleetProcess(coordinator.address, coordinator.token, HOSTS, RANKS) as fleet:
        fleet.wait_connected()
        before = cpu_s(process)
        job_id = client.submit(spec("train", HOSTS, RANKS)).job_id
        deadline = time.monotonic() + 120.0
        while client.list(limit=1)[0].state != common_pb2.JOB_STATE_RUNNING:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        client.cancel(job_id)
        assert ended(client, job_id) == common_pb2.JOB_STATE_CANCELLED
        counts = fleet.counts()
        assert counts.broken == 0 and counts.stopped == HOSTS
        spent = cpu_s(process) - before
        print(f"wide: {spent:.2f} s of processor time")
        assert spent < WIDE_BUDGET_S
