"""Elastic jobs, as a user has them: the others go on, in the same processes."""

import json
import os
import signal
import time
from pathlib import Path

from rig.limits import SOON_S
from rig.ranks.elastic import PROGRAM


def seen(service, job_id, holds):
    """The job as soon as ``holds`` says yes of it."""
    return service.sandbox.wait_until(
        lambda: (job := service.job(job_id)) and holds(job) and job, SOON_S, lambda: str(service.job(job_id))
    )


def trains(service, job_id, *members):
    """The job as soon as these members compute together."""
    words = f" of {len(members)} sum {sum(members)}\n"

    def whole(job):
        there = job["state"] == "running" and [rank["member"] for rank in job["ranks"]] == list(members)
        return there and all(
            rank["log_path"] and Path(rank["log_path"]).read_text().endswith(words) for rank in job["ranks"]
        )

    return seen(service, job_id, whole)


def test_a_job_grows_is_scaled_paused_and_drained(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 1)
    job_id = service.submit("--nnodes", "1:2", sandbox.script("t.py", PROGRAM))
    first = trains(service, job_id, 0)["ranks"][0]["pid"]

    second = service.start_node("node-b", 1, "--drain-grace", "60")
    job = trains(service, job_id, 0, 1)
    assert not job["gone"] and not job["growth"] and not job["joining"]

    assert "should have 1" in service.call("job", "scale", job_id, "1").out
    trains(service, job_id, 0)
    job = seen(
        service, job_id, lambda job: job["gone"] and job["gone"][0]["exit_code"] is not None
    )  # the others do not wait for it
    assert job["wanted_nodes"] == 1 and job["gone"][0]["exit_code"] == 0
    refused = service.call("job", "scale", job_id, "3")
    assert refused.code == 1 and "was submitted for 1 to 2 nodes" in refused.err

    service.call("job", "pause", job_id)
    job = seen(service, job_id, lambda job: job["state"] == "waiting")
    assert (job["reason"], job["paused"]) == ("paused", True)
    with service.client() as client:
        client.scale(job_id, 2)
    service.call("job", "resume", job_id)
    trains(service, job_id, 0, 2)

    second.terminate()
    assert second.wait(SOON_S) == 0
    job = trains(service, job_id, 0)
    assert job["ranks"][0]["pid"] == first
    assert [(rank["member"], rank["exit_code"], rank["signal"]) for rank in job["gone"]] == [(1, 0, 0), (2, 0, 0)]
    (sandbox.folder / "stop").touch()
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S)
    assert (job["state"], job["reason"]) == ("succeeded", "1 rank ended with exit code 0")

    wrong = sandbox.script("wrong.py", "raise ValueError('the learning rate is negative')")
    job = service.wait_for_state(service.submit("--elastic", wrong), ["failed"], within=SOON_S)
    assert job["reason"].endswith("exited with code 1: ValueError: the learning rate is negative")


def test_a_run_goes_on_without_a_killed_rank_and_shows_newcomers(sandbox):
    script = sandbox.script("train.py", PROGRAM)
    options = ("--elastic", "--respawn", "1", "--nproc-per-node", "2", "--output", "json")
    process = sandbox.start(*sandbox.command, "run", *options, script)
    started = time.monotonic()
    lines = []

    def until(*texts):
        """The output of ranks is on standard error, where the document is for programs."""
        while not all(any(text in line for line in lines) for text in texts):
            lines.append(process.stderr.readline())
            assert lines[-1], lines

    def kill(rank):
        ours = [pid for pid, line in sandbox.marked().items() if str(script) in line and "bagua.cli" not in line]
        [victim] = [pid for pid in ours if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(victim, signal.SIGKILL)

    until(*(f"generation 1 rank {rank} of 2 sum 1" for rank in range(2)))
    kill(1)
    until("generation 2: rank 1 on node node-0 was killed by SIGKILL", "[rank 2] newcomer 0 of 1")
    until("generation 3: 1 rank joins on node-0; 2 ranks from the next step on")
    until("[rank 2] generation 3 rank 1 of 2 sum 2")
    kill(0)
    until("generation 4 rank 0 of 1 sum 2")
    (sandbox.folder / "stop").touch()
    finished = sandbox.finish(process, started)
    document = json.loads(finished.out.splitlines()[-1])
    assert (finished.code, document["state"], document["generation"]) == (0, "succeeded", 4), finished.text
    assert sorted((rank["member"], rank["signal"]) for rank in document["gone"]) == [(0, 9), (1, 9)]
