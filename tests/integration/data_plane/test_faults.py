"""A host or a rank is killed while large operations run: errors name it, memory stays bounded, nothing is left."""

import signal

import pytest
from plane import world

LAYOUT = [[0, 1], [2]]
SLACK = 24 << 20  # bytes by which a process may grow for other reasons than data that nobody takes


@pytest.fixture
def under_load(make_hosts, make_job, request):
    """A job whose ranks are in the midst of large all-reduces, and what its hosts held before."""
    hosts = make_hosts(2)
    make_job(LAYOUT, hosts=hosts, name="first").leave()  # what is made once has been made
    base = [world.held_by(process.pid) for process in hosts.processes]
    job = make_job(LAYOUT, hosts=hosts)
    began = job.ask("load", nbytes=64 << 20 if request.config.getoption("--full") else 8 << 20, depth=2)
    assert all(answer == {"began": True} for answer in began.values()), began
    return job, base


def check_end(job, ranks, named, base):
    """These ranks get an error that names the cause. The hosts hold no more than ``base`` when the job is over."""
    answers = job.answers(ranks, timeout=30.0)
    assert all(named in answer.get("error", "") for answer in answers.values()), answers
    for rank in job.ranks.values():
        rank.end()
    job.close()
    for process, held in zip(job.hosts.processes, base, strict=False):
        world.wait_for(lambda process=process, held=held: is_back_at(process.pid, held), 30.0)


def is_back_at(pid, base):
    """Memory: the allocator may keep some."""
    now = world.held_by(pid)
    few = now.resident < base.resident + SLACK and now.mappings <= base.mappings + 8
    return few and (now.descriptors, now.threads) == (base.descriptors, base.threads)


def test_killed_host(under_load):
    job, base = under_load
    left = job.hosts.processes[0]
    full = world.held_by(left.pid).resident
    job.hosts.processes[1].signal(signal.SIGKILL)
    assert "daemon" in job.answers([2], timeout=30.0)[2]["error"]
    assert world.held_by(left.pid).resident < full + SLACK
    check_end(job, [0, 1], "host 1 (rank 2)", base[:1])


def test_killed_rank(under_load):
    job, base = under_load
    pid = job.ranks[1].pid
    job.ranks[1].signal(signal.SIGKILL)
    check_end(job, [0, 2], f"rank 1 (pid {pid})", base)
