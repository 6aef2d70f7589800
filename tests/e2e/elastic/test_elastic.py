"""Elastic jobs, as a user has them: ranks and daemons are killed, the others go on, in the same processes."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from rig.limits import SOON_S
from rig.ranks.elastic import CLOSED, PROGRAM

from bagua.base.daemon_process import daemon_pid

PIDFD_GETFD = 438  # number of a system call that Python does not have


def printed(job, line):
    """Every rank of the job has printed ``line``, with its rank for ``{}``."""
    return all(
        line.format(rank["rank"]) in Path(rank["log_path"]).read_text() for rank in job["ranks"] if rank["log_path"]
    )


def in_generation(service, job_id, generation):
    found = service.sandbox.wait_until(
        lambda: (job := service.job(job_id))["generation"] == generation and job,
        SOON_S,
        lambda: str(service.job(job_id)),
    )
    assert found["state"] == "running", found["reason"]
    return found


@pytest.mark.full  # test_elastic_promise.py loses a rank and a host, too
def test_a_service_goes_on_without_a_rank_and_without_a_daemon(idle_service, sandbox):
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
    assert "elastic    generation 3, 1 rank on 1 node (from 1 to 2)" in shown and "\ngone:\n" in shown

    (sandbox.folder / "stop").touch()
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S * 4)  # until node-b is fenced
    assert (job["state"], job["reason"]) == ("succeeded", "1 rank ended with exit code 0")


def break_connections(pid, address):
    """Shuts down the established connections of a process, a child of this one, to and from an engine."""
    port = int(address.rpartition(":")[2])
    process = os.pidfd_open(pid)
    broken = 0
    try:
        for found in psutil.Process(pid).net_connections("tcp"):
            ends = [end.port for end in (found.laddr, found.raddr) if end]
            if found.status == psutil.CONN_ESTABLISHED and port in ends:
                copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, found.fd, 0)
                if copy < 0:  # the engine has closed it: it has seen the first one break
                    continue
                with contextlib.suppress(OSError), socket.socket(fileno=copy) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1
    finally:
        os.close(process)
    return broken


@pytest.mark.full  # test_chaos.py cuts links, too
def test_a_broken_connection_costs_no_member(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    first = service.start_node("node-a", 1)
    service.start_node("node-b", 1)
    job_id = service.submit("--nnodes", "2:2", sandbox.script("train.py", CLOSED))
    job = service.wait_for_state(job_id, ["running"], within=60)
    sandbox.wait_until(lambda: printed(job, "generation 1 rank {} of 2 sum 1"), SOON_S)
    pids = [rank["pid"] for rank in job["ranks"]]
    ready = [event["reason"] for event in job["events"] if event["kind"] == "engine_ready"]

    assert sum(break_connections(daemon_pid(first.pid), line.rpartition(" ")[2]) for line in ready)
    job = in_generation(service, job_id, 2)
    assert job["reason"].startswith("generation 2: node node-") and job["reason"].endswith("; 2 ranks go on")
    assert [rank["pid"] for rank in job["ranks"]] == pids and not job["gone"]
    sandbox.wait_until(lambda: printed(job, "generation 2 rank {} of 2 sum 1"), SOON_S)
    assert "suspended" in [event["kind"] for event in service.job(job_id)["events"]]

    os.kill(pids[1], signal.SIGKILL)
    job = service.wait_for_state(job_id, ["failed"], within=SOON_S)
    assert job["reason"].endswith("1 node is left, and the job needs at least 2: its program takes no newcomers")


def test_a_run_goes_on_without_a_killed_rank(sandbox):
    script = sandbox.script("train.py", PROGRAM)
    process = sandbox.start(*sandbox.command, "run", "--elastic", "--nproc-per-node", "3", "--output", "json", script)
    started = time.monotonic()
    lines = []
    assert process.stderr is not None

    def until(*texts):
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


BEGINS = """
import os, signal
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
import torch
import torch.distributed as dist
import bagua.torch_api as bagua
bagua.init_process_group()
mine, theirs = torch.ones(1), torch.ones(1)
bagua.allreduce_inplace(mine)
dist.all_reduce(theirs)
print(f"rank {bagua.get_rank()} of {bagua.get_world_size()} sums {mine.item():g} {theirs.item():g}", flush=True)
"""


@pytest.mark.full
def test_a_rank_is_killed_before_it_has_joined(sandbox):
    """Its process has ended: the others, which come later, go on without it, and events say why."""
    script = sandbox.script("train.py", BEGINS)
    process = sandbox.start(*sandbox.command, "run", "--elastic", "--nproc-per-node", "3", "--output", "json", script)
    finished = sandbox.finish(process, time.monotonic())
    document = json.loads(finished.out.splitlines()[-1])
    assert (finished.code, document["state"], document["generation"]) == (0, "succeeded", 2), finished.text
    assert "generation 2: rank 0 on node node-0 was killed by SIGKILL" in finished.err
    assert all(f"rank {rank} of 2 sums 2 2" in finished.err for rank in range(2)), finished.text


@pytest.mark.full
def test_a_node_is_lost_before_it_has_started_its_ranks(idle_service, sandbox):
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 1)
    second = service.start_node("node-b", 1)
    both = (daemon_pid(second.pid), second.pid)
    for pid in both:
        os.kill(pid, signal.SIGSTOP)  # its session lives
    job_id = service.submit("--elastic", "--nnodes", "2", sandbox.script("train.py", PROGRAM))
    job = service.wait_for_state(job_id, ["starting"], within=SOON_S)
    sandbox.wait_until(lambda: service.job(job_id)["ranks"][0]["pid"], SOON_S)
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    job = in_generation(service, job_id, 2)
    assert job["reason"].startswith("generation 2: node node-b") and job["reason"].endswith("; 1 rank goes on")
    sandbox.wait_until(lambda: printed(job, "generation 2 rank {} of 1 sum 0"), SOON_S)
    (sandbox.folder / "stop").touch()
    service.wait_for_state(job_id, ["succeeded"], within=SOON_S * 4)  # until node-b is fenced
