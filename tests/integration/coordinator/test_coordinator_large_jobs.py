"""Jobs with large arguments: everybody else's commands go on."""

import json

from typer.testing import CliRunner

from bagua.cli.app import app
from bagua.proto import common_pb2 as c


def test_seventy_jobs_of_a_megabyte_leave_every_command_working(start, monkeypatch):
    coordinator = start()
    variables = {"BAGUA_COORDINATOR": coordinator.address, "BAGUA_TOKEN_FILE": str(coordinator.token_file)}

    def bagua(*arguments):
        done = CliRunner().invoke(app, ["job", *arguments], env={**variables, "BAGUA_TOKEN": None, "COLUMNS": None})
        assert done.exit_code == 0, done.output
        return done.output

    monkeypatch.setattr("bagua.client.client.PAGE", 30)  # pages are followed
    half = "x" * 510_000
    spec = c.JobSpec(name="large", entry="t.py", args=[half], env={"E": half}, nnodes=9, nproc_per_node=1)
    spec.placement_timeout_s = 3_600
    with coordinator.client() as client:
        jobs = [client.submit(spec).job_id for _ in range(70)]
        found = client.list()
    assert [job.job_id for job in found] == jobs[::-1]
    assert all(job.ByteSize() < 1_000 and job.spec.name == "large" for job in found)
    assert len(bagua("list", "--limit", "1000").splitlines()) == 71
    assert len(json.loads(bagua("list", "--limit", "60", "--output", "json"))["jobs"]) == 60
    assert f"job        {jobs[3]} (large)" in bagua("show", jobs[3][:-1])
    assert json.loads(bagua("show", jobs[3], "--output", "json"))["args"] == [half]
    assert bagua("logs", jobs[3]) == ""
    assert jobs[3] in bagua("cancel", jobs[3][:-1])
