"""Elastic jobs, as a user has them: ranks and daemons are killed, the others go on, in the same processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rig.elastic import PROGRAM
from rig.limits import SOON_S

if TYPE_CHECKING:
    from tests.e2e.conftest import Sandbox, Service


def printed(job: dict[str, Any], line: str) -> bool:
    """Every rank of the job has printed ``line``, with its rank for ``{}``."""
    return all(
        line.format(rank["rank"]) in Path(rank["log_path"]).read_text() for rank in job["ranks"] if rank["log_path"]
    )


def in_generation(service: Service, job_id: str, generation: int) -> dict[str, Any]:
    found: dict[str, Any] = service.sandbox.wait_until(
        lambda: (job := service.json("job", "show", job_id))["generation"] == generation and job,
        SOON_S,
        lambda: str(service.json("job", "show", job_id)),
    )
    assert found["state"] == "running", found["reason"]
    return found


def test_a_service_goes_on_without_a_rank_and_without_a_daemon(idle_service: Service, sandbox: Sandbox) -> None:
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 2)
    second = service.start_node("node-b", 2)
    script = sandbox.script("train.py", PROGRAM)
    job_id = service.submit("--elastic", "--nnodes", "2", "--nproc-per-node", "2", script)
    job = service.wait_for_state(job_id, ["running"], within=60)
    sandbox.wait_until(lambda: printed(job, "generation 1 rank {} of 4 sum 6"), SOON_S)
    pids = {rank["member"]: rank["pid"] for rank in job["ranks"]}

    os.kill(pids[1], signal.SIGKILL)
    job = in_generation(service, job_id, 2)
    assert job["reason"].startswith("generation 2: rank 1 on node node-a was killed by SIGKILL")
    assert job["reason"].endswith("; 3 ranks go on")
    assert [(rank["rank"], rank["member"], rank["pid"]) for rank in job["ranks"]] == [
        (0, 0, pids[0]),
        (1, 2, pids[2]),
        (2, 3, pids[3]),
    ]
    sandbox.wait_until(lambda: printed(job, "generation 2 rank {} of 3 sum 5"), SOON_S)

    second.kill()
    job = in_generation(service, job_id, 3)
    assert job["reason"].startswith("generation 3: node node-b")
    assert job["reason"].endswith(" is gone: its session ended, and node node-a has lost it, too; 1 rank goes on")
    sandbox.wait_until(lambda: printed(job, "generation 3 rank {} of 1 sum 0"), SOON_S)
    assert [(rank["member"], rank["last_generation"], rank["signal"]) for rank in job["gone"]] == [
        (1, 1, 9),
        (2, 2, 0),
        (3, 2, 0),
    ]
    assert [event["kind"] for event in job["events"]].count("regrouped") == 2
    shown = service.call("job", "show", job_id).out
    assert "elastic    generation 3, 1 of 4 ranks, at least 1 node" in shown and "\ngone:\n" in shown

    (sandbox.folder / "stop").touch()
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S * 4)  # until node-b is fenced
    assert (job["state"], job["reason"]) == ("succeeded", "1 rank ended with exit code 0")


def test_a_run_goes_on_without_a_killed_rank(sandbox: Sandbox) -> None:
    script = sandbox.script("train.py", PROGRAM)
    process = sandbox.start(*sandbox.command, "run", "--elastic", "--nproc-per-node", "3", "--output", "json", script)
    started = time.monotonic()
    lines: list[str] = []
    assert process.stderr is not None

    def until(*texts: str) -> None:
        """The output of ranks is on standard error, where the document is for programs."""
        assert process.stderr is not None
        while not all(any(text in line for line in lines) for text in texts):
            line = process.stderr.readline()
            assert line, lines
            lines.append(line)

    until(*(f"generation 1 rank {rank} of 3 sum 3" for rank in range(3)))
    victims = [
        pid for pid, command in sandbox.marked().items() if str(script) in command and "bagua.cli" not in command
    ]
    assert len(victims) == 3, sandbox.marked()
    (victim,) = (pid for pid in victims if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    until("generation 2: rank 1 on node node-0 was killed by SIGKILL")
    until(*(f"generation 2 rank {rank} of 2 sum 2" for rank in range(2)))
    (sandbox.folder / "stop").touch()
    finished = sandbox.finish(process, started)
    document = json.loads(finished.out.splitlines()[-1])
    assert (finished.code, document["state"], document["generation"]) == (0, "succeeded", 2), finished.text
    assert [(rank["member"], rank["signal"]) for rank in document["gone"]] == [(1, 9)]
