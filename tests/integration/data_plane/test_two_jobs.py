"""Two jobs on the same hosts at once: both get on, and neither sees the other."""

import pytest
from plane import world

LAYOUT = [[0, 1], [2]]


@pytest.fixture
def two_jobs(make_hosts, make_job):
    hosts = make_hosts(2)
    return [make_job(LAYOUT, hosts=hosts, name=name) for name in ("one", "two")]


def test_both_make_progress(two_jobs):
    """The same load in both: neither starves. The machine may favour one for a while, so the share of a quarter has to
    come true in one of the windows, of 40 MiB of the slower job each."""
    for job in two_jobs:
        job.say("load", nbytes=2 << 20, depth=2)
    for job in two_jobs:
        assert all(answer == {"began": True} for answer in job.answers().values())

    def local_bytes():
        return [job.state()["stats"]["bytes_local"] for job in two_jobs]

    windows = []
    while not any(shares[1] < 4 * shares[0] for shares in windows):
        assert len(windows) < 5, windows
        before = local_bytes()

        def shares(before=before):
            return sorted(now - was for now, was in zip(local_bytes(), before, strict=True))

        world.wait_for(lambda shares=shares: shares()[0] > (40 << 20), 60.0, local_bytes)
        windows.append(shares())
    for job in two_jobs:
        job.say("stop")
    for job in two_jobs:
        answers = list(job.answers().values())
        assert answers == [{"done": answers[0]["done"], "wrong": 0}] * 3
        job.leave()


def test_no_memory_in_common(two_jobs):
    """A rank holds its own segments, channel and lifeline, and the pages of the job and of its generation, which its
    job's local ranks share; nothing of the other job, nor another rank's tensors."""
    for job in two_jobs:
        job.ask("alloc", nbytes=100_000)
    one, two = ([world.shared_memory_of(process.pid) for process in job.ranks.values()] for job in two_jobs)
    assert all(len(held) == 6 for held in (*one, *two)), (one, two)
    assert not set.union(*one) & set.union(*two)
    assert len(one[0] & one[1]) == 2, "the pages"
    assert not (one[0] | one[1]) & one[2], "another host"
