"""Planned changes of an elastic job, as users ask for them, through daemons, coordinator and command line."""

import os
import signal
import time
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.ranks.elastic import PROGRAM

from bagua.base.daemon_process import daemon_pid


def seen(service, job_id, holds):
    """The job as soon as ``holds`` says yes of it."""
    found = service.sandbox.wait_until(
        lambda: (job := service.job(job_id)) and holds(job) and job, SOON_S, lambda: str(service.job(job_id))
    )
    return found


def members(job):
    return [rank["member"] for rank in job["ranks"]]


def last_line(rank):
    return (Path(rank["log_path"]).read_text().splitlines() or [""])[-1]


def test_scale_pause_and_resume(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    for name in ("node-a", "node-b"):
        service.start_node(name, 1)
    job_id = service.submit("--nnodes", "1:2", sandbox.script("t.py", PROGRAM))
    seen(service, job_id, lambda job: job["state"] == "running" and members(job) == [0, 1])

    assert "should have 1" in service.call("job", "scale", job_id, "1").out
    job = seen(service, job_id, lambda job: members(job) == [0] and job["gone"] and job["gone"][0]["exit_code"] == 0)
    assert job["wanted_nodes"] == 1 and "node-b leaves" in job["reason"]
    refused = service.call("job", "scale", job_id, "3")
    assert refused.code == 1 and "was submitted for 1 to 2 nodes" in refused.err

    service.call("job", "pause", job_id)
    job = seen(service, job_id, lambda job: job["state"] == "waiting")
    assert (job["reason"], job["paused"]) == ("paused", True)
    assert "waiting: paused" in service.call("job", "show", job_id).out
    service.call("job", "scale", job_id, "2")
    service.call("job", "resume", job_id)
    job = seen(service, job_id, lambda job: job["state"] == "running" and members(job) == [0, 2])
    sandbox.wait_until(lambda: all("of 2 sum 2" in last_line(rank) for rank in job["ranks"]), SOON_S)
    assert not job["growth"] and not job["joining"]

    (sandbox.folder / "stop").touch()
    assert service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S)["state"] == "succeeded"
    assert "has ended: it is succeeded" in service.call("job", "pause", job_id).err


@pytest.mark.full  # tests/unit/coordinator/test_coordinator_joins.py and test_coordinator_changes.py have the decisions
def test_a_lost_rank_is_replaced_and_the_last_node_is_not_drained(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 2)
    script = sandbox.script("t.py", PROGRAM)
    job_id = service.submit("--elastic", "--respawn", "1", "--nproc-per-node", "2", script)
    job = seen(service, job_id, lambda job: job["state"] == "running" and all(rank["pid"] for rank in job["ranks"]))
    assert "is the last one of job" in service.call("node", "drain", "node-a").err

    os.kill(job["ranks"][1]["pid"], signal.SIGKILL)
    job = seen(service, job_id, lambda job: members(job) == [0, 2])
    sandbox.wait_until(lambda: all("of 2 sum 2" in last_line(rank) for rank in job["ranks"]), SOON_S)
    assert [(rank["member"], rank["signal"]) for rank in job["gone"]] == [(1, 9)]

    os.kill(job["ranks"][0]["pid"], signal.SIGKILL)
    job = seen(service, job_id, lambda job: members(job) == [2])
    assert job["growth"] == "its ranks were replaced too often"


@pytest.mark.full  # tests/unit/coordinator/test_coordinator_changes.py has the decisions
def test_below_its_minimum_a_job_waits_for_a_node(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 1)
    second = service.start_node("node-b", 1)
    job_id = service.submit("--min-nodes", "2", "--max-nodes", "2", sandbox.script("t.py", PROGRAM))
    job = seen(service, job_id, lambda job: job["state"] == "running" and members(job) == [0, 1])
    # Until its program says that it takes newcomers a job fails instead.
    sandbox.wait_until(lambda: all("of 2 sum 1" in last_line(rank) for rank in job["ranks"]), SOON_S)

    second.kill()
    job = seen(service, job_id, lambda job: job["state"] == "waiting")
    assert job["reason"].startswith("1 of 2 nodes: node node-b") and members(job) == [0]
    service.start_node("node-c", 1)
    job = seen(service, job_id, lambda job: job["state"] == "running" and members(job) == [0, 2])
    sandbox.wait_until(lambda: all("of 2 sum 2" in last_line(rank) for rank in job["ranks"]), SOON_S)


@pytest.mark.full  # integration/node/test_node_elastic.py upgrades daemons
def test_a_node_is_upgraded_below_its_ranks(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    keeper = service.start_node("node-a", 2)
    job_id = service.submit("--elastic", "--nproc-per-node", "2", sandbox.script("t.py", PROGRAM))
    job = seen(service, job_id, lambda job: job["state"] == "running" and len(members(job)) == 2)
    sandbox.wait_until(lambda: all("generation 1" in last_line(rank) for rank in job["ranks"]), SOON_S)
    former, pids = daemon_pid(keeper.pid), [rank["pid"] for rank in job["ranks"]]

    done = service.call("node", "upgrade", "node-a")
    assert done.code == 0 and "node-a has a new daemon, of version" in done.out, done.text
    assert daemon_pid(keeper.pid) != former
    job = seen(service, job_id, lambda job: job["generation"] == 2 and job["state"] == "running")
    sandbox.wait_until(lambda: all("generation 2" in last_line(rank) for rank in job["ranks"]), SOON_S)
    assert [rank["pid"] for rank in job["ranks"]] == pids
    assert "was replaced by the one that is installed now" in job["reason"]
    assert [len(Path(rank["log_path"]).read_text().splitlines()) for rank in job["ranks"]] == [2, 2]

    assert "There is no node 'node-x'" in service.call("node", "upgrade", "node-x").err
    (sandbox.folder / "stop").touch()
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=30)
    assert job["state"] == "succeeded" and {rank["exit_code"] for rank in job["ranks"]} == {0}


def test_run_shows_the_output_of_newcomers(sandbox):
    script = sandbox.script("t.py", PROGRAM)
    options = ("--elastic", "--respawn", "1", "--nproc-per-node", "2", "--output", "json")
    process = sandbox.start(*sandbox.command, "run", *options, script)
    started = time.monotonic()
    assert process.stderr is not None
    lines = []

    def until(text):
        """The output of ranks is on standard error, where the document is for programs."""
        assert process.stderr is not None
        while not any(text in line for line in lines):
            lines.append(process.stderr.readline())
            assert lines[-1], lines

    until("generation 1 rank 1 of 2 sum 1")
    marked = sandbox.marked()
    ranks = [pid for pid, command in marked.items() if str(script) in command and "bagua.cli" not in command]
    (victim,) = (pid for pid in ranks if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    until("[rank 2] newcomer 0 of 1")
    until("generation 3: 1 rank joins on node-0; 2 ranks from the next step on")
    until("[rank 2] generation 3 rank 1 of 2 sum 2")
    (sandbox.folder / "stop").touch()
    assert sandbox.finish(process, started).code == 0
