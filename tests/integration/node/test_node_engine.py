"""Ranks that really join the engine: spawned and adopted ones, their farewell and their death."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import grpc
import grpc.aio
import pytest
from rig.limits import SOON_S
from rig.node_daemon import plan
from rig.ranks.elastic import JOIN

from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import common_pb2, node_pb2, rank_pb2

RUNNING, EXITED = common_pb2.RANK_STATE_RUNNING, common_pb2.RANK_STATE_EXITED
MEET = f"""{JOIN}
def barrier():
    rank.wait(rank.submit(comm=0, kind=core.KINDS["barrier"], dtype=core.DTYPES["uint8"], count=0))
"""
STAY = MEET + "barrier()\nprint('met', flush=True)\nsys.stdin.readline()\nbarrier()\nrank.close()\n"


def statuses(job):
    return [(rank.state, rank.exit_code, rank.signal) for rank in job.ranks]


async def test_a_killed_rank_is_the_cause_that_the_others_see(end, daemon, script):
    """The kernel hangs up the dying rank's connection first, but the reason is its death."""
    text = MEET + "barrier()\nif me == 1: os.kill(os.getpid(), 9)\nbarrier()\n"
    await end.run_script("job", script(text), nproc=2)
    job = await end.exited("job")
    assert job.ranks[1].signal == signal.SIGKILL and job.error == ""
    assert job.ranks[0].exit_code == 1 and f"rank 1 (pid {job.ranks[1].pid})" in job.ranks[0].error_tail
    assert 0 <= job.ranks[0].exited_at - job.ranks[1].exited_at < SOON_S


async def test_ranks_that_end_well_without_a_word(end, daemon, script):
    """Code 0 of all is success, though nobody took leave of the engine."""
    await end.run_script("job", script(MEET + "barrier()\nos._exit(0)\n"), nproc=2)
    job = await end.exited("job")
    await asyncio.sleep(1.0)  # longer than the engine's complaint may wait for a verdict
    assert statuses(job) == [(EXITED, 0, 0)] * 2 and end.jobs["job"].error == ""


async def test_who_waits_for_whom(end, daemon, rank_stub, script):
    await end.run_script("job", script(MEET + "if me == 0: barrier()\ntime.sleep(600)\n"), nproc=2)
    request = rank_pb2.DescribeWaitsRequest(job_id=f"{end.prefix}job")
    async with asyncio.timeout(30):
        while not (now := (await rank_stub.DescribeWaits(request, timeout=5)).waiting):
            await asyncio.sleep(0.1)
    assert "1" in now
    assert "1" in (await end.job_until("job", lambda job: job.waiting, 30)).waiting
    assert (await end.end_job()).waiting == ""


class Adopted:
    """Ranks of an adopted job, started here as torchrun would."""

    def __init__(self, end, daemon):
        self.end = end
        self.variables = {"BAGUA_JOB_ID": f"{end.prefix}job", "BAGUA_DAEMON_SOCKET": daemon.ready["socket"]}
        self.ranks = []

    async def run(self, **spec):
        await self.end.run("job", [plan((0, 1))], adopt=True, nproc_per_node=2, **spec)

    def start(self, script, *ranks):
        for rank in ranks:
            environment = {**os.environ, **self.variables, "RANK": str(rank)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.ranks.append(subprocess.Popen([sys.executable, str(script)], env=environment, **pipes))
        return self.ranks

    def go_on(self, *ranks):
        for rank in ranks:
            self.ranks[rank].stdin.write(b"\n")
            self.ranks[rank].stdin.flush()

    async def until(self, condition):
        return await self.end.job_until("job", condition)


@pytest.fixture
def adopted(end, daemon):
    ranks = Adopted(end, daemon)
    yield ranks
    for process in ranks.ranks:
        process.kill()
        process.communicate()


async def test_adopted_ranks_come_and_go(end, daemon, adopted, script, rank_stub):
    """They may come before the job does. Who says goodbye has ended well."""
    path = script(STAY)
    adopted.start(path, 0)
    await adopted.run()
    job = await adopted.until(lambda job: job.ranks[0].state == RUNNING)
    assert job.ranks[0].pid == adopted.ranks[0].pid and job.ranks[1].state == common_pb2.RANK_STATE_WAITING
    adopted.start(path, 1)
    await end.runs()
    adopted.go_on(0, 1)
    job = await end.exited("job")
    assert statuses(job) == [(EXITED, 0, 0)] * 2 and job.phase == node_pb2.LOCAL_PHASE_STARTED and not job.error
    with pytest.raises(grpc.aio.AioRpcError) as error:
        about = {"job_id": f"{end.prefix}job", "rank": 0, "pid": os.getpid(), "wire_version": WIRE_VERSION}
        await rank_stub.Join(rank_pb2.JoinRequest(**about), timeout=5)
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_job_that_nobody_joins_ends(end, daemon, adopted):
    await adopted.run(join_timeout_s=0.2)
    assert (await end.stopped("job")).error == "no rank joined on node n within 0.2 s"


async def test_an_adopted_rank_is_killed(end, daemon, adopted, script):
    await adopted.run()
    first, second = adopted.start(script(STAY), 0, 1)
    await end.runs()
    adopted.go_on(0)
    second.kill()
    job = await adopted.until(lambda job: job.ranks[1].state == EXITED)
    assert job.ranks[1].signal == signal.SIGKILL and job.ranks[1].error_tail
    assert await asyncio.to_thread(first.wait, 10) == 1, "it learns it at once"
    await end.exited("job")


async def test_an_adopted_process_dies_before_it_connects(end, daemon, adopted, script):
    text = JOIN.replace("rank = core.Rank", "os._exit(3)\nrank = core.Rank")
    await adopted.run()
    adopted.start(script(text), 1)
    job = await adopted.until(lambda job: job.ranks[1].state == EXITED)
    assert job.ranks[1].signal == signal.SIGKILL and "process has ended" in job.ranks[1].error_tail


async def test_cancel_leaves_adopted_processes_to_their_starter(end, daemon, adopted, script):
    await adopted.run()
    processes = adopted.start(script(STAY), 0, 1)
    for process in processes:
        assert await asyncio.to_thread(process.stdout.readline) == b"met\n"
    begin = time.monotonic()
    await end.end_job(grace_s=0.5)
    assert time.monotonic() - begin < SOON_S
    assert [process.poll() for process in processes] == [None, None]
    adopted.go_on(0)
    assert await asyncio.to_thread(processes[0].wait, 10) == 1, "the engine is gone, and it says so"
