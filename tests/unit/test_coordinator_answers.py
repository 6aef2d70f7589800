"""Answers about jobs of many ranks: what has not changed is not encoded again, and nobody sees a difference."""

from __future__ import annotations

from dataclasses import replace

from bagua.daemon.coordinator.answers import Answers
from bagua.daemon.coordinator.domain import HostRecord, JobRecord, JobState, RankRecord, RankState
from bagua.daemon.coordinator.translate import checked_spec, job_message
from bagua.proto import common_pb2

HOSTS, NPROC = 50, 4


def running(job_id: str = "job-1", tail: str = "") -> JobRecord:
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


def exited(job: JobRecord, index: int) -> JobRecord:
    host = job.hosts[index]
    ranks = tuple(replace(rank, state=RankState.EXITED, exit_code=1, error_tail="Error: 7") for rank in host.ranks)
    return replace(job, hosts=(*job.hosts[:index], replace(host, ranks=ranks), *job.hosts[index + 1 :]))


def test_only_hosts_that_changed_are_encoded_again() -> None:
    answers, job = Answers(), running()
    progress = common_pb2.Progress(job_id="job-1", rank=3, step=5)
    assert answers.job(job, progress) == job_message(job, progress)
    assert answers.encoded == HOSTS
    assert answers.job(replace(job, reason="still"), None) == job_message(replace(job, reason="still"))
    assert answers.encoded == HOSTS
    changed = exited(job, 17)
    assert answers.job(changed) == job_message(changed) != job_message(job)
    assert answers.encoded == HOSTS + 1


def test_jobs_before_their_placement_and_after_their_end() -> None:
    answers, job = Answers(), running()
    waiting = replace(job, state=JobState.PENDING, generation=0, hosts=())
    for shown in (waiting, job, replace(job, state=JobState.FAILED, reason="rank 3 failed"), waiting, job):
        assert answers.job(shown) == job_message(shown)


def test_last_lines_that_fit_into_no_answer_are_left_out_as_ever() -> None:
    answers, job = Answers(), running(tail="x" * (16 << 20 >> 8))  # 12.5 MiB in all
    assert answers.job(job) == job_message(job)
    assert answers.job(job).ByteSize() < 10_000_000


def test_few_jobs_are_remembered() -> None:
    answers = Answers()
    jobs = [running(f"job-{number}") for number in range(5)]
    for job in jobs:
        answers.job(job)
    answers.job(jobs[4])
    assert answers.encoded == 5 * HOSTS
    answers.job(jobs[0])
    assert answers.encoded == 6 * HOSTS
