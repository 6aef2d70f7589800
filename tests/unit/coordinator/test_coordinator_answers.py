"""Answers about jobs of many ranks: what has not changed is not encoded again, and nobody sees a difference."""

import asyncio
from dataclasses import replace

from bagua.daemon.coordinator.api.response_cache import Answers
from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, JobState, NodeView, RankRecord, RankState
from bagua.daemon.coordinator.rules.translate import checked_spec, job_message, node_message
from bagua.proto import common_pb2, job_pb2

HOSTS, NPROC = 50, 4


def running(job_id="job-1", tail=""):
    spec = checked_spec(common_pb2.JobSpec(entry="t.py", nnodes=HOSTS, nproc_per_node=NPROC, env={"A_TOKEN": "x"}))
    hosts = tuple(
        HostRecord(
            index, f"n{index}", "h", "::1", "boot", index * NPROC, NPROC, waiting="for n1" if index == 3 else "",
            ranks=tuple(
                RankRecord(index * NPROC + local, local, f"n{index}", RankState.RUNNING, 100 + local, error_tail=tail)
                for local in range(NPROC)
            ),
        )
        for index in range(HOSTS)
    )  # fmt: skip
    return JobRecord(job_id, spec, 1.0, JobState.RUNNING, reason="all run", generation=2, hosts=hosts)


def exited(job, index):
    host = job.hosts[index]
    ranks = tuple(replace(rank, state=RankState.EXITED, exit_code=1, error_tail="Error: 7") for rank in host.ranks)
    return replace(job, hosts=(*job.hosts[:index], replace(host, ranks=ranks), *job.hosts[index + 1 :]))


async def test_only_hosts_that_changed_are_encoded_again():
    answers, job = Answers(), running()
    progress = common_pb2.Progress(job_id="job-1", rank=3, step=5)
    assert await answers.job(job, progress) == job_message(job, progress)
    assert answers.encoded == HOSTS
    assert await answers.job(replace(job, reason="still"), None) == job_message(replace(job, reason="still"))
    assert answers.encoded == HOSTS
    changed = exited(job, 17)
    assert await answers.job(changed) == job_message(changed) != job_message(job)
    assert answers.encoded == HOSTS + 1


async def test_other_calls_get_a_turn_while_many_hosts_are_encoded():
    small = running()
    job = replace(small, hosts=tuple(host for _ in range(20) for host in small.hosts))  # 1,000
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    for shown in (job, replace(job, state=JobState.FAILED)):
        turns = 0
        assert await Answers().job(shown) == job_message(shown)
        assert turns >= 9
    task.cancel()


def test_only_nodes_that_changed_are_encoded_again():
    answers = Answers()
    views = [NodeView(f"n{i}", "h", "::1", "boot", 8, 0, i > 0, 1.0, last_seen=5.0) for i in range(3)]
    for now in (7.0, 8.0):
        expected = [node_message(replace(view, last_seen=now) if view.connected else view) for view in views]
        assert answers.nodes(views, now, "n2") == job_pb2.ListNodesReply(nodes=expected, next_page_token="n2")
    assert answers.encoded == 3
    views[1] = replace(views[1], used=4)
    assert [node.used_slots for node in answers.nodes(views, 9.0, "").nodes] == [0, 4, 0]
    assert answers.encoded == 4
