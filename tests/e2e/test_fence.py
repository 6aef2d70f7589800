"""A job never runs twice: a real coordinator gives up a real daemon only when that one's ranks are gone.

``integration/node/test_node_fence.py`` has the daemon's side, and ``simulation`` both sides under other faults."""

import os
import signal
import time

import psutil
from rig.limits import SOON_S
from rig.peer_relay import Relay

from bagua.base.machine_clock import STANDSTILL_S
from bagua.proto import common_pb2

LEASE_S, FENCE_S = 2, 3
TICK = """
import os, sys, time
while True:
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.02)
"""


def computes(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_cluster_that_slept_goes_on_and_a_node_that_is_cut_off_has_ended_its_ranks(idle_service, sandbox):
    service, ticks = idle_service, sandbox.folder / "ticks"
    times = {"BAGUA_COORDINATOR_HEARTBEAT_S": "0.3", "BAGUA_COORDINATOR_LEASE_S": f"{LEASE_S}"}
    sandbox.env |= times
    service.start_coordinator("--fence-after", f"{FENCE_S}")
    relay = Relay(service.address)
    keeper = service.start_node("node-a", 2, "--coordinator", relay.address)
    script = sandbox.script("tick.py", TICK)

    def run():
        """The id of a job of two ranks, and their processes, once they compute."""
        ticks.unlink(missing_ok=True)
        job_id = service.submit("--nproc-per-node", "2", script, ticks)
        job = service.wait_for_state(job_id, ["running"], SOON_S)
        sandbox.wait_until(lambda: ticks.exists() and len(set(ticks.read_text().split())) == 2, SOON_S)
        return job_id, [psutil.Process(rank["pid"]) for rank in job["ranks"]]

    try:
        job_id, ranks = run()
        node = psutil.Process(keeper.pid)
        asleep = [node, *node.children(recursive=True), service.coordinator]
        for process in asleep:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2 * FENCE_S + STANDSTILL_S)
        seen = ticks.stat().st_size
        for process in asleep:
            os.kill(process.pid, signal.SIGCONT)
        sandbox.wait_until(lambda: service.connected_nodes() == {"node-a"}, SOON_S)
        time.sleep(2 * LEASE_S)
        with service.client() as client:
            assert client.get(job_id).state == common_pb2.JOB_STATE_RUNNING and all(map(computes, ranks))
        sandbox.wait_until(lambda: ticks.stat().st_size > seen, SOON_S)
        [log] = sandbox.runtime.glob("daemon-*.log")
        assert "ranks are held" in log.read_text()

        relay.part(silent=True)
        sandbox.wait_until(lambda: service.state(job_id) in ("failed", "cancelled", "succeeded"), SOON_S)
        assert not any(map(computes, ranks)), "these ranks compute on after their job FAILED"
        job = service.job(job_id)
        assert job["state"] == "failed" and "has not been heard of for 2 s" in job["reason"]
        assert set(ticks.read_text().split()) == {str(rank.pid) for rank in ranks}
        relay.heal()
        _, others = run()
        assert all(map(computes, others))
        assert "could not reach the coordinator for 3 s" in log.read_text()
    finally:
        relay.close()
