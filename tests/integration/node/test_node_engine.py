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

from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import common_pb2, node_pb2, rank_pb2

RUNNING, EXITED = common_pb2.RANK_STATE_RUNNING, common_pb2.RANK_STATE_EXITED

JOIN = """
import os, sys, time, grpc
import bagua.csrc
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import rank_pb2
from bagua.proto.rank_pb2_grpc import RankServiceStub
core = bagua.csrc.load()
me = int(os.environ["RANK"])
with grpc.insecure_channel("unix:" + os.environ["BAGUA_DAEMON_SOCKET"]) as channel:
    about = dict(job_id=os.environ["BAGUA_JOB_ID"], rank=me, pid=os.getpid())
    request = rank_pb2.JoinRequest(**about, wire_version=WIRE_VERSION)
    reply = RankServiceStub(channel).Join(request, timeout=60)
rank = core.Rank(data_socket=reply.data_socket, token=reply.data_token, rank=me)
def barrier():
    kinds = core.KINDS["barrier"], core.DTYPES["uint8"]
    rank.wait(rank.submit(comm=0, kind=kinds[0], dtype=kinds[1], count=0))
"""
STAY = JOIN + "barrier()\nprint('met', flush=True)\nsys.stdin.readline()\nbarrier()\nrank.close()\n"


def statuses(job):
    return [(rank.state, rank.exit_code, rank.signal) for rank in job.ranks]


async def test_a_killed_rank_is_the_cause_that_the_others_see(end, daemon, script):
    """The kernel hangs up the dying rank's connection first, but the reason is its death."""
    text = JOIN + "barrier()\nif me == 1: os.kill(os.getpid(), 9)\nbarrier()\n"
    await end.run_script("job", script(text), nproc=3)
    job = await end.exited("job")
    assert job.ranks[1].signal == signal.SIGKILL and job.error == ""
    assert min(job.ranks, key=lambda rank: rank.exited_at).rank == 1
    words = f"rank 1 (pid {job.ranks[1].pid})"
    for rank in (job.ranks[0], job.ranks[2]):
        assert rank.exit_code == 1 and words in rank.error_tail
        assert rank.exited_at - job.ranks[1].exited_at < SOON_S


async def test_ranks_that_end_well_without_a_word(end, daemon, script):
    """Code 0 of all is success, though nobody took leave of the engine."""
    await end.run_script("job", script(JOIN + "barrier()\nos._exit(0)\n"), nproc=2)
    job = await end.exited("job")
    await asyncio.sleep(1.0)  # longer than the engine's complaint may wait for a verdict
    assert statuses(job) == [(EXITED, 0, 0)] * 2 and end.jobs["job"].error == ""


async def test_who_waits_for_whom(end, daemon, rank_stub, script):
    text = JOIN + "print('.', flush=True)\nif me == 0: barrier()\ntime.sleep(600)\n"
    await end.run_script("job", script(text), nproc=2)
    request = rank_pb2.DescribeWaitsRequest(job_id="job")
    async with asyncio.timeout(30):
        while not (now := (await rank_stub.DescribeWaits(request, timeout=5)).waiting):
            await asyncio.sleep(0.1)
    assert "rank 1" in now or "1" in now
    job = await end.job_until("job", lambda job: job.waiting, 30)
    assert "1" in job.waiting
    await end.stop_job("job")
    assert (await end.stopped("job")).waiting == ""


class Adopted:
    """Ranks of an adopted job, started here as torchrun would."""

    def __init__(self, end, daemon):
        self.end, self.daemon = end, daemon
        self.ranks = []

    async def run(self, nproc=2, **spec):
        await self.end.send(
            run=node_pb2.RunJob(
                job_id="job",
                generation=1,
                spec=common_pb2.JobSpec(adopt=True, nnodes=1, nproc_per_node=nproc, **spec),
                hosts=[node_pb2.HostPlan(node_id="n", address="127.0.0.1", ranks=range(nproc))],
                job_key=bytes(32),
            )
        )

    def start(self, script, rank):
        env = dict(os.environ, RANK=str(rank), BAGUA_JOB_ID="job", BAGUA_DAEMON_SOCKET=self.daemon.ready["socket"])
        process = subprocess.Popen(
            [sys.executable, str(script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.ranks.append(process)
        return process

    async def until(self, condition):
        return await self.end.job_until("job", condition)


@pytest.fixture
async def adopted(end, daemon):
    ranks = Adopted(end, daemon)
    yield ranks
    for process in ranks.ranks:
        process.kill()
        process.communicate()


async def test_adopted_ranks_come_and_go(end, daemon, adopted, script, rank_stub):
    """They may come before the job does. Who says goodbye has ended well."""
    path = script(STAY)
    first = adopted.start(path, 0)
    await adopted.run()
    job = await adopted.until(lambda job: job.ranks[0].state == RUNNING)
    assert job.ranks[0].pid == first.pid and job.ranks[1].state == common_pb2.RANK_STATE_WAITING
    second = adopted.start(path, 1)
    await adopted.until(lambda job: [rank.state for rank in job.ranks] == [RUNNING] * 2)
    for process in (first, second):
        process.stdin.write(b"\n")
        process.stdin.flush()
    job = await end.exited("job")
    assert statuses(job) == [(EXITED, 0, 0)] * 2 and job.phase == node_pb2.LOCAL_PHASE_STARTED and not job.error
    with pytest.raises(grpc.aio.AioRpcError) as error:
        request = rank_pb2.JoinRequest(job_id="job", rank=0, pid=os.getpid(), wire_version=WIRE_VERSION)
        await rank_stub.Join(request, timeout=5)
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    await end.stop_job("job")
    await end.stopped("job")


async def test_a_job_that_nobody_joins_ends(end, daemon, adopted):
    await adopted.run(join_timeout_s=0.2)
    job = await adopted.until(lambda job: job.phase == node_pb2.LOCAL_PHASE_STOPPED)
    assert job.error == "no rank joined on node n within 0.2 s"


async def test_an_adopted_rank_is_killed(end, daemon, adopted, script):
    path = script(STAY)
    await adopted.run()
    processes = [adopted.start(path, rank) for rank in (0, 1)]
    await adopted.until(lambda job: [rank.state for rank in job.ranks] == [RUNNING] * 2)
    processes[0].stdin.write(b"\n")
    processes[0].stdin.flush()
    processes[1].kill()
    job = await adopted.until(lambda job: job.ranks[1].state == EXITED)
    assert job.ranks[1].signal == signal.SIGKILL and job.ranks[1].error_tail
    assert await asyncio.to_thread(processes[0].wait, 10) == 1, "it learns it at once"
    job = await end.exited("job")
    await end.stop_job("job")
    await end.stopped("job")


async def test_an_adopted_process_dies_before_it_connects(end, daemon, adopted, script):
    text = JOIN.replace("rank = core.Rank", "os._exit(3)\nrank = core.Rank")
    await adopted.run()
    adopted.start(script(text), 1)
    job = await adopted.until(lambda job: job.ranks[1].state == EXITED)
    assert job.ranks[1].signal == signal.SIGKILL and "process has ended" in job.ranks[1].error_tail


async def test_cancel_leaves_adopted_processes_to_their_starter(end, daemon, adopted, script):
    path = script(STAY)
    await adopted.run()
    processes = [adopted.start(path, rank) for rank in (0, 1)]
    for process in processes:
        assert await asyncio.to_thread(process.stdout.readline) == b"met\n"
    begin = time.monotonic()
    await end.stop_job("job", grace_s=0.5)
    await end.stopped("job")
    assert time.monotonic() - begin < SOON_S
    assert [process.poll() for process in processes] == [None, None]
    processes[0].stdin.write(b"\n")
    processes[0].stdin.flush()
    assert await asyncio.to_thread(processes[0].wait, 10) == 1, "the engine is gone, and it says so"
