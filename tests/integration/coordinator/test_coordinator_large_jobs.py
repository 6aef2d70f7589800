"""Jobs with large arguments, evil names and values that are no numbers: everybody else's commands go on."""

import json

import pytest
from typer.testing import CliRunner

from bagua.cli.app import app
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b"


@pytest.fixture
def coordinator(start):
    return start()


@pytest.fixture
def bagua(coordinator, monkeypatch):
    """Runs the command line; returns what it printed."""
    monkeypatch.setenv("BAGUA_COORDINATOR", coordinator.address)
    monkeypatch.setenv("BAGUA_TOKEN_FILE", str(coordinator.token_file))
    for name in ("BAGUA_TOKEN", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments, code=0):
        done = CliRunner().invoke(app, arguments)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        return done.output

    return run


def valid(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_seventy_jobs_of_a_megabyte_leave_every_command_working(client, bagua):
    half = "x" * 510_000
    spec = c.JobSpec(name="large", entry="t.py", args=[half], env={"E": half}, nnodes=9, nproc_per_node=1)
    spec.placement_timeout_s = 3_600
    jobs = [client.submit(spec).job_id for _ in range(70)]
    found = client.list()
    assert [job.job_id for job in found] == jobs[::-1]
    assert all(job.ByteSize() < 1_000 and job.spec.name == "large" for job in found)
    assert len(bagua("job", "list", "--limit", "1000").splitlines()) == 71
    assert len(valid(bagua("job", "list", "--limit", "60", "--output", "json"))["jobs"]) == 60
    assert f"job        {jobs[3]} (large)" in bagua("job", "show", jobs[3][:-1])
    assert valid(bagua("job", "show", jobs[3], "--output", "json"))["args"] == [half]
    assert bagua("job", "logs", jobs[3]) == ""
    assert jobs[3] in bagua("job", "cancel", jobs[3][:-1])


def test_pages_are_followed(coordinator, client, connect, monkeypatch):
    monkeypatch.setattr("bagua.client.client.PAGE", 2)
    spec = c.JobSpec(entry="t.py", nnodes=9, nproc_per_node=1, placement_timeout_s=3_600)
    jobs = [client.submit(spec).job_id for _ in range(5)][::-1]
    assert [job.job_id for job in client.list()] == jobs
    assert [job.job_id for job in client.list(limit=3)] == jobs[:3]
    for name in ("b", "a", "c"):
        connect(coordinator, name)
    assert [node.node_id for node in client.nodes()] == ["a", "b", "c"]


def test_what_others_name_is_shown_and_not_obeyed(coordinator, client, connect, bagua, until):
    peer = connect(coordinator, f"node{EVIL}")
    job = client.submit(c.JobSpec(name=EVIL, entry=EVIL, args=[EVIL], workdir=f"/{EVIL}", nnodes=1, nproc_per_node=1))
    run = peer.expect(n.RunJob)
    peer.report(run, n.LOCAL_PHASE_STARTED, {0: {"state": c.RANK_STATE_RUNNING, "pid": 1}}, waiting=EVIL)
    until(client, job.job_id, c.JOB_STATE_RUNNING)
    metrics = {"loss": float("nan"), "best": float("inf"), "worst": float("-inf"), EVIL: 1.0}
    report = c.Progress(job_id=job.job_id, step=1, metrics=metrics, message=EVIL)
    peer.send(n.NodeFact(progress=report))
    for update in client.watch(job.job_id):
        if update.WhichOneof("update") == "progress" or update.job.HasField("progress"):
            break
    client.cancel(job.job_id, reason=EVIL)
    for command in (["job", "list"], ["job", "show", job.job_id], ["node", "list"]):
        shown = bagua(*command)
        assert "\\x1b]0;owned" in shown and not set(shown) & set("\x1b\x07\x9b"), command
        document = valid(bagua(*command, "--output", "json"))
        if command[0] == "job":
            progress = document.get("jobs", [document])[0]["progress"]
            assert progress["metrics"] == {"loss": "NaN", "best": "Infinity", "worst": "-Infinity", EVIL: 1.0}
