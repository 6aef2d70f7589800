"""An elastic job grows when a node comes, and leaves one as planned: the daemons, the coordinator and the command line
together."""

import os
import signal
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.ranks.elastic import PROGRAM

from bagua.base.daemon_process import daemon_pid


def printed(job, line):
    """Every rank of the job has printed ``line``, with its rank for ``{}``."""
    return all(line.format(rank["rank"]) in Path(rank["log_path"]).read_text() for rank in job["ranks"])


def with_ranks(service, job_id, count):
    """The job as soon as it runs with so many ranks."""
    found = service.sandbox.wait_until(
        lambda: (
            (job := service.job(job_id))["state"] == "running"
            and len(job["ranks"]) == count
            and all(rank["state"] == "running" for rank in job["ranks"])
            and job
        ),
        60,
        lambda: str(service.job(job_id)),
    )
    return found


@pytest.mark.full  # integration/node/test_node_elastic.py kills one, too
def test_a_daemon_is_killed_and_its_ranks_go_on(idle_service, sandbox):
    """On one of two nodes: nobody is out, no process is another one."""
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 2)
    second = service.start_node("node-b", 2)
    job_id = service.submit("--nnodes", "2:2", "--nproc-per-node", "2", sandbox.script("t.py", PROGRAM))
    job = with_ranks(service, job_id, 4)
    sandbox.wait_until(lambda: printed(job, "generation 1 rank {} of 4 sum 6"), SOON_S)
    for generation in (2, 3):
        os.kill(daemon_pid(second.pid), signal.SIGKILL)
        words = f"generation {generation} rank {{}} of 4 sum 6"
        sandbox.wait_until(lambda words=words: printed(job, words), SOON_S, lambda: str(service.job(job_id)))
    after = service.job(job_id)
    assert [rank["pid"] for rank in after["ranks"]] == [rank["pid"] for rank in job["ranks"]] and not after["gone"]
    (sandbox.folder / "stop").touch()
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S)
    assert (job["state"], job["reason"]) == ("succeeded", "all 4 ranks ended with exit code 0")


def test_a_job_grows_onto_a_node_that_comes_and_leaves_it_when_it_is_drained(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 2)
    job_id = service.submit("--elastic", "--nnodes", "1:2", "--nproc-per-node", "2", sandbox.script("t.py", PROGRAM))
    job = with_ranks(service, job_id, 2)
    sandbox.wait_until(lambda: printed(job, "generation 1 rank {} of 2 sum 1"), SOON_S)
    pids = {rank["member"]: rank["pid"] for rank in job["ranks"]}

    second = service.start_node("node-b", 2, "--drain-grace", "60")
    job = with_ranks(service, job_id, 4)
    sandbox.wait_until(lambda: printed(job, "rank {} of 4 sum 6"), SOON_S)
    assert [rank["member"] for rank in job["ranks"]] == [0, 1, 2, 3] and not job["gone"]
    assert {rank["member"]: rank["pid"] for rank in job["ranks"]}.items() >= pids.items()

    second.terminate()
    assert second.wait(SOON_S) == 0
    job = with_ranks(service, job_id, 2)
    sandbox.wait_until(lambda: Path(job["ranks"][0]["log_path"]).read_text().endswith(" of 2 sum 1\n"), SOON_S)
    assert {rank["member"]: rank["pid"] for rank in job["ranks"]} == pids
    assert [(rank["member"], rank["exit_code"], rank["signal"]) for rank in job["gone"]] == [(2, 0, 0), (3, 0, 0)]

    (sandbox.folder / "stop").touch()
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S)
    assert (job["state"], job["reason"]) == ("succeeded", "all 2 ranks ended with exit code 0")
