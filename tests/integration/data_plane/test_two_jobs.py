"""Two jobs on the same hosts at once: both get on, and neither sees the other."""

import secrets

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


def test_tokens_of_one_job_open_nothing_of_the_other(two_jobs):
    one, two = two_jobs
    answer = one.ranks[0].ask("knock", socket=two.sockets[0], token=one.tokens[0], rank=1)
    assert "wrong token" in answer["refused"]
    assert two.state()["stats"]["bad_connections"] == 1
    assert two.state()["error"] == ""


def test_segments_of_others_are_refused(two_jobs):
    """The number of a segment of another rank of the same host means nothing."""
    one, two = two_jobs
    other = one.ranks[1].ask("alloc", nbytes=4096)["segments"][0]
    mine = one.ranks[0].ask("alloc", nbytes=4096)["segments"][0]
    call = {"count": 16, "src": [other, 0], "dst": [mine, 0]}
    error = one.ranks[0].ask("call", calls=[["allreduce", "float32", call]])["error"]
    assert f"segment {other} as src, which it does not hold" in error
    assert two.state()["error"] == "", "the other job does not care"
    assert list(two.ask("barrier").values()) == [{}] * 3


def refused(stats):
    """Connections and messages of others that a host sent away."""
    return stats["bad_connections"] + stats["frames_dropped"]


@pytest.mark.parametrize("what", ["key", "name", "generation"])
def test_connections_of_another_job_are_refused(make_hosts, make_job, what):
    """A host that was told another job's address does not get in, and that job goes on."""
    hosts = make_hosts(2)
    job = make_job(LAYOUT, hosts=hosts, name="one")
    under_load = job.ask("load", nbytes=1 << 20, depth=2)
    assert all(answer == {"began": True} for answer in under_load.values())
    # A job that is the same but for one thing, on hosts of its own.
    other = world.Job(
        make_hosts(2), LAYOUT, name="two" if what == "name" else "one", generation=2 if what == "generation" else 1,
        connect_timeout_s=3.0, key=secrets.token_hex(32) if what == "key" else job.key,
    )  # fmt: skip
    try:
        other.addresses = [other.addresses[0], job.addresses[1]]
        other.connect()
        error = world.wait_for(lambda: other.state(0)["error"], 30.0)
        assert "no connection to host 1 (rank 2)" in error, error
    finally:
        other.end()
    # A host under load may look at who called after the caller has given up.
    world.wait_for(lambda: refused(job.state(1)["stats"]), 30.0)
    job.say("stop")
    assert all(answer["wrong"] == 0 for answer in job.answers().values())
    job.leave()
