"""A daemon with an elastic job: a rank is killed, the others go on in the next generation, in the same processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from rig.elastic import PROGRAM

from bagua.proto import common_pb2, node_pb2

RUNNING, EXITED = common_pb2.RANK_STATE_RUNNING, common_pb2.RANK_STATE_EXITED


class Elastic:
    """The coordinator's side of one job on one node."""

    def __init__(self, end, script):
        self.end = end
        self.script = script

    async def run(self, members, generation=1):
        await self.end.send(
            run=node_pb2.RunJob(
                job_id="job",
                generation=generation,
                spec=common_pb2.JobSpec(
                    entry=str(self.script),
                    workdir=str(self.script.parent),
                    nnodes=1,
                    nproc_per_node=3,
                    stop_grace_s=5.0,
                    elastic=True,
                ),
                hosts=[node_pb2.HostPlan(node_id="n", address="127.0.0.1", ranks=range(len(members)), members=members)],
                job_key=bytes(32),
                master_addr="127.0.0.1",
                master_port=12345,
            )
        )

    async def until(self, condition):
        return await self.end.job_until("job", condition)

    async def all_running(self):
        return await self.until(lambda job: job.ranks and all(rank.state == RUNNING for rank in job.ranks))


@pytest.fixture
def elastic(end, daemon, script):
    return Elastic(end, script(PROGRAM))


def printed(rank):
    return Path(rank.log_path).read_text().splitlines()


async def until_printed(end, ranks, line):
    """Their logs are files: nothing tells of a new line."""
    async with asyncio.timeout(60):
        for rank in ranks:
            while line(rank) not in printed(rank):
                await asyncio.sleep(0.02)


async def test_the_others_go_on_without_a_killed_rank(end, daemon, elastic):
    await elastic.run([0, 1, 2])
    job = await elastic.all_running()
    await until_printed(end, job.ranks, lambda rank: f"generation 1 rank {rank.rank} of 3 sum 3")
    pids = {rank.member: rank.pid for rank in job.ranks}
    os.kill(pids[1], signal.SIGKILL)
    job = await elastic.until(lambda job: job.suspended and job.ranks[1].state == EXITED)
    assert "rank 1" in job.suspended or "member 1" in job.suspended
    assert (job.ranks[1].signal, job.error, job.phase) == (9, "", node_pb2.LOCAL_PHASE_STARTED)
    assert [rank.state for rank in job.ranks] == [RUNNING, EXITED, RUNNING]
    await elastic.run([0, 2], generation=2)
    job = await elastic.until(lambda job: job.generation == 2)
    assert not job.suspended
    assert [(rank.rank, rank.member, rank.pid) for rank in job.ranks] == [(0, 0, pids[0]), (1, 2, pids[2])]
    await until_printed(end, job.ranks, lambda rank: f"generation 2 rank {rank.rank} of 2 sum 2")
    (elastic.script.parent / "stop").touch()
    job = await end.exited("job")
    assert [(rank.exit_code, rank.signal) for rank in job.ranks] == [(0, 0)] * 2, [r.error_tail for r in job.ranks]
    await end.stop_job("job", generation=2)
    assert (await end.stopped("job")).error == ""


async def test_two_losses_down_to_one_rank(end, daemon, elastic):
    await elastic.run([0, 1, 2])
    job = await elastic.all_running()
    await until_printed(end, job.ranks, lambda rank: f"generation 1 rank {rank.rank} of 3 sum 3")
    pids = [rank.pid for rank in job.ranks]
    os.kill(pids[0], signal.SIGKILL)
    await elastic.until(lambda job: job.ranks[0].state == EXITED)
    await elastic.run([1, 2], generation=2)
    await elastic.until(lambda job: job.generation == 2)
    os.kill(pids[1], signal.SIGKILL)
    await elastic.until(lambda job: job.generation == 2 and job.ranks[0].state == EXITED)
    await elastic.run([2], generation=3)
    job = await elastic.until(lambda job: job.generation == 3)
    await until_printed(end, job.ranks, lambda rank: "generation 3 rank 0 of 1 sum 2")
    assert job.ranks[0].pid == pids[2]
    await end.stop_job("job", generation=3)
    await end.stopped("job")


async def test_a_rank_that_is_out_is_ended(end, daemon, elastic, until_gone):
    """The coordinator may have its own reason: a silent rank."""
    await elastic.run([0, 1, 2])
    job = await elastic.all_running()
    await until_printed(end, job.ranks, lambda rank: f"generation 1 rank {rank.rank} of 3 sum 3")
    out = job.ranks[2].pid
    await elastic.run([0, 1], generation=2)
    job = await elastic.until(lambda job: job.generation == 2)
    await until_gone([out])
    await until_printed(end, job.ranks, lambda rank: f"generation 2 rank {rank.rank} of 2 sum 1")
    assert end.jobs["job"].error == ""
    await end.stop_job("job", generation=2)
    await end.stopped("job")


async def test_an_exception_ends_the_job(end, daemon, elastic):
    end_of_step = "    if numbers[1]:"
    elastic.script.write_text(PROGRAM.replace(end_of_step, f"    if me == 1: raise ValueError('no')\n{end_of_step}"))
    await elastic.run([0, 1, 2])
    job = await end.exited("job")
    assert job.ranks[1].exit_code == 1 and "ValueError: no" in job.ranks[1].error_tail
    assert all("rank 1 (pid" in rank.error_tail for rank in job.ranks if rank.rank != 1)


async def test_a_generation_after_the_first_begins_nothing_anew(end, daemon, elastic):
    """Its ranks were here once, and are no more; or never were."""
    await elastic.run([0, 1, 2], generation=2)
    job = await end.stopped("job")
    assert job.generation == 2 and not job.ranks
    await elastic.run([0, 1, 2], generation=3)
    assert (await elastic.until(lambda job: job.generation == 3)).phase == node_pb2.LOCAL_PHASE_STOPPED


async def test_a_stopped_job_says_in_the_next_generation_how_it_ended(end, daemon, elastic):
    await elastic.run([0, 1, 2])
    await elastic.all_running()
    await end.stop_job("job", grace_s=1.0)
    await end.stopped("job")
    await elastic.run([0, 1, 2], generation=2)
    job = await elastic.until(lambda job: job.generation == 2)
    assert job.phase == node_pb2.LOCAL_PHASE_STOPPED and [rank.state for rank in job.ranks] == [EXITED] * 3


async def test_a_daemon_that_is_stopped_withdraws(end, daemon, elastic):
    await elastic.run([0, 1, 2])
    await elastic.all_running()
    daemon.process.send_signal(signal.SIGTERM)
    job = await elastic.until(lambda job: job.withdrawn)
    assert "was stopped (SIGTERM)" in job.error
    assert await daemon.wait() == 0
