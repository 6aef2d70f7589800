"""A data network that breaks between hosts, while all reach the coordinator: elastic jobs go on without few hosts."""

import json

import pytest
from rig.clusters.namespaces import bagua, hosts_up, start_cluster

from bagua.chaos.diary import Diaries, violations

pytestmark = [pytest.mark.root, pytest.mark.slow]
HERE = 3  # the coordinator's host
WITHIN_S = 240.0


class Training:
    """A job on hosts 0, 1 and 2, which all reach the coordinator on a fourth one."""

    def __init__(self, hosts, sandbox):
        self._hosts = hosts
        self._wait_until = sandbox.wait_until
        folder = hosts.folder
        self._folder = folder / "diaries"
        self._folder.mkdir()
        self._reach = start_cluster(hosts, folder, (), (), (), coordinator=HERE)
        size = ("--elastic", "--min-nodes", "1", "--nnodes", "3", "--nproc-per-node", "1")
        program = ("-m", "bagua.chaos.training", str(self._folder), "0", "0.03")
        submit = ("job", "submit", *size, "--env", "OMP_NUM_THREADS=1", "--output", "json", *self._reach)
        self.id = json.loads(hosts.run(HERE, *bagua(*submit, *program)).splitlines()[-1])["job_id"]
        self._diaries = Diaries(self._folder)
        self.wait_for_steps(3)

    def job(self):
        return json.loads(self._hosts.run(HERE, *bagua("job", "show", self.id, "--output", "json", *self._reach)))

    def wait_for_steps(self, ranks, more=20):
        """Until that many ranks make steps together."""
        before = {pid: len(diary.steps) for pid, diary in self._diaries.read().items()}

        def enough():
            now = self._diaries.read()
            made = [pid for pid, diary in now.items() if len(diary.steps) >= before.get(pid, 0) + more]
            return len(made) == ranks and all(now[pid].world == ranks for pid in made)

        self._wait_until(enough, WITHIN_S, lambda: str(self.job()))

    def finish(self):
        (self._folder / "stop").touch()
        self._wait_until(lambda: self.job()["state"] in ("succeeded", "failed"), WITHIN_S)
        job = self.job()
        assert job["state"] == "succeeded", job["reason"]
        assert violations(self._diaries.read()) == []
        return job


def hosts_in(job):
    return {rank["node_id"].partition("-")[0] for rank in job["ranks"]}


@pytest.fixture
def training(tmp_path, sandbox):
    with hosts_up(tmp_path, 4) as hosts:
        yield Training(hosts, sandbox), hosts


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("broken", "left"),
    [
        pytest.param(((1, 2), (2, 1)), 2, id="a link"),
        pytest.param(((2, 1),), 2, id="one direction", marks=pytest.mark.full),
        pytest.param(((0, 1), (1, 0), (2, 1), (1, 2)), 2, id="all links of a host", marks=pytest.mark.full),
    ],
)
def test_a_broken_network(training, broken, left):
    job, hosts = training
    for source, target in broken:
        hosts.cut(source, target)
    job.wait_for_steps(left)
    shown = job.job()
    assert shown["state"] == "running" and "is put out, since nothing passes between it and" in shown["reason"], shown
    nodes = hosts_in(shown)
    assert not any({f"h{source}", f"h{target}"} <= nodes for source, target in broken) and len(nodes) == left
    job.finish()
