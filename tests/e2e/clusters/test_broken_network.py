"""A data network that breaks between hosts, while all reach the coordinator: elastic jobs go on without few hosts."""

import json

import pytest
from rig.clusters.namespaces import bagua, hosts_up, start_cluster
from rig.ranks.elastic import PROGRAM

pytestmark = [pytest.mark.root, pytest.mark.slow]
HERE = 3  # the coordinator's host
WITHIN_S = 240.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("broken", "left"),
    [
        pytest.param(((1, 2), (2, 1)), 2, id="a link"),
        pytest.param(((2, 1),), 2, id="one direction", marks=pytest.mark.full),
        pytest.param(((0, 1), (1, 0), (2, 1), (1, 2)), 2, id="all links of a host", marks=pytest.mark.full),
    ],
)
def test_a_broken_network(tmp_path, sandbox, broken, left):
    """Of hosts 0, 1 and 2."""
    with hosts_up(tmp_path, 4) as hosts:
        reach = start_cluster(hosts, tmp_path, (), (), (), coordinator=HERE)
        (tmp_path / "train.py").write_text(PROGRAM)
        size = ("--elastic", "--min-nodes", "1", "--nnodes", "3", "--nproc-per-node", "1", "--workdir", str(tmp_path))
        submitted = hosts.run(HERE, *bagua("job", "submit", *size, *reach, "--output", "json", "train.py"))
        job_id = json.loads(submitted.splitlines()[-1])["job_id"]

        def compute(ranks):
            """So many do, together."""
            last = [path.read_text().splitlines()[-1:] for path in tmp_path.rglob("rank-*.log")]
            return sum(f" of {ranks} sum " in line for lines in last for line in lines) == ranks

        def job():
            return json.loads(hosts.run(HERE, *bagua("job", "show", job_id, "--output", "json", *reach)))

        sandbox.wait_until(lambda: compute(3), WITHIN_S, lambda: str(job()))
        for source, target in broken:
            hosts.cut(source, target)
        sandbox.wait_until(lambda: compute(left), WITHIN_S, lambda: str(job()))
        shown = job()
        assert shown["state"] == "running", shown
        assert "is put out, since nothing passes between it and" in shown["reason"], shown
        nodes = {rank["node_id"].partition("-")[0] for rank in shown["ranks"]}
        assert len(nodes) == left and not any({f"h{one}", f"h{other}"} <= nodes for one, other in broken), shown
        (tmp_path / "stop").touch()
        sandbox.wait_until(lambda: job()["state"] in ("succeeded", "failed"), WITHIN_S)
        assert job()["state"] == "succeeded", job()
