"""The promises of the README about elastic jobs, as they are written there.

The program counts in which committed steps each sample was (client/chaos/training.py), and hashes its state.
"""

import os
import signal

from rig.limits import SOON_S

from bagua.chaos.diary import Diaries, violations

PROGRAM = ("-m", "bagua.chaos.training")
REST_S = "0.03"
"""Of a rank after a step: leaves the processor to the rest of the test."""


class Training:
    """A job that trains, and its diaries."""

    def __init__(self, service, folder, *options, within=SOON_S):
        self.service = service
        self.folder = folder
        self.within = within
        folder.mkdir()
        self._diaries = Diaries(folder)
        self.id = service.submit("--elastic", "--env", "OMP_NUM_THREADS=1", *options, *PROGRAM, folder, "1", REST_S)
        job = service.wait_for_state(self.id, ["running"], within=SOON_S)
        self.nodes = {rank["pid"]: rank["node_id"] for rank in job["ranks"]}
        self.pids = [rank["pid"] for rank in job["ranks"]]  # by rank
        self.wait_for_steps(self.pids)

    def diaries(self):
        return self._diaries.read()

    def wait_for_steps(self, pids, more=5):
        """Until each of these processes has made so many steps more."""
        before = {pid: len(diary.steps) for pid, diary in self.diaries().items()}

        def enough():
            now = self.diaries()
            return all(pid in now and len(now[pid].steps) >= before.get(pid, 0) + more for pid in pids)

        self.service.sandbox.wait_until(enough, self.within, lambda: str(self.service.job(self.id)))

    def finish(self):
        """Asks for the end. The job must come to a good one; the diaries of those that are left."""
        (self.folder / "stop").touch()
        job = self.service.wait_for_state(self.id, ["succeeded", "failed"], within=2 * SOON_S)
        assert job["state"] == "succeeded", job["reason"]
        found = self.diaries()
        assert violations(found) == [], "samples lost 0, samples doubled 0, replicas different 0"
        return {pid: diary for pid, diary in found.items() if diary.ended}


def test_a_lost_member_costs_no_sample_and_restarts_nobody(idle_service, sandbox):
    """Rank 0 first, then its host, whose address is MASTER_ADDR; with a coordinator that was away in between."""
    service = idle_service
    service.start_coordinator("--fence-after", "10")
    nodes = {name: service.start_node(name, 2) for name in ("node-a", "node-b")}
    shape = ("--nnodes", "2", "--nproc-per-node", "2")
    training = Training(service, sandbox.folder / "diaries", *shape)
    first = training.nodes[training.pids[0]]

    os.kill(training.pids[0], signal.SIGKILL)
    training.wait_for_steps(training.pids[1:])
    assert {diary.world for pid, diary in training.diaries().items() if pid != training.pids[0]} == {3}

    assert service.coordinator is not None
    service.coordinator.kill()
    service.coordinator.wait()
    training.wait_for_steps(training.pids[1:], more=20)
    service.start_coordinator("--fence-after", "10")
    sandbox.wait_until(lambda: service.connected_nodes() == {"node-a", "node-b"}, SOON_S)

    nodes[first].kill()
    left = [pid for pid in training.pids if training.nodes[pid] != first]
    training.wait_for_steps(left)
    ended = training.finish()
    assert sorted(ended) == sorted(left), "the processes of before, and no others"
    assert {diary.world for diary in ended.values()} == {2}
