"""Faults while large operations run: who waits for whom is told, errors name the peer, memory stays bounded, nothing is
left behind, and no wrong result ever."""

import re
import signal
import time

from plane import world

LAYOUT = [[0, 1], [2]]
SLACK = 24 << 20  # bytes by which a process may grow for other reasons than data that nobody takes


def under_load(make_job, nbytes, **options):
    """A job whose ranks are in the midst of all-reduces of ``nbytes``."""
    job = make_job(LAYOUT, **options)
    began = job.ask("load", nbytes=nbytes, depth=2)
    assert all(answer == {"began": True} for answer in began.values()), began
    return job


def finish(job):
    """Ends the load; all results of all ranks were right, and as many."""
    done_before = [job.state(host)["stats"]["ops"] for host in range(len(LAYOUT))]
    world.wait_for(
        lambda: all(job.state(h)["stats"]["ops"] > before + 2 for h, before in enumerate(done_before)),
        60.0,
        lambda: [job.state(host) for host in range(len(LAYOUT))],
    )
    job.say("stop")
    answers = list(job.answers().values())
    assert answers == [{"done": answers[0]["done"], "wrong": 0}] * 3
    assert [job.state(host)["error"] for host in range(len(LAYOUT))] == ["", ""]
    job.leave()


def test_stalled_rank(make_job, operation_bytes):
    job = under_load(make_job, operation_bytes)
    world.stop(job.ranks[1])
    first = world.wait_for(lambda: job.state(0, 0.3)["waiting"], 60.0)
    assert re.search(r"all-reduce #\d+ of world.*: rank 0 has been waiting for rank 1 for [\d.]+ m?s", first), first
    other = world.wait_for(lambda: job.state(1, 0.3)["waiting"], 60.0)
    assert "host 0 (ranks 0, 1)" in other, other
    longer = world.wait_for(lambda: job.state(0, 1.0)["waiting"], 60.0)
    assert "waiting for rank 1" in longer, "the time that is told grows"
    world.go_on(job.ranks[1])
    finish(job)


def test_stalled_host(make_job, operation_bytes):
    """The daemon of host 1 stops; TCP holds host 0 back, whose memory does not grow."""
    job = under_load(make_job, operation_bytes)
    before = [world.held_by(process.pid).resident for process in (job.hosts.processes[0], job.ranks[0])]
    world.stop(job.hosts.processes[1])
    waiting = world.wait_for(lambda: job.state(0, 1.0)["waiting"], 60.0)
    assert "host 1 (rank 2)" in waiting, waiting
    after = [world.held_by(process.pid).resident for process in (job.hosts.processes[0], job.ranks[0])]
    assert all(now < was + SLACK for was, now in zip(before, after, strict=True)), (before, after)
    world.go_on(job.hosts.processes[1])
    finish(job)


def failed(job, ranks):
    """The errors that these ranks get."""
    answers = job.answers(ranks, timeout=30.0)
    assert all("error" in answer for answer in answers.values()), answers
    return [answer["error"] for answer in answers.values()]


def test_killed_host(make_hosts, make_job, operation_bytes):
    hosts = make_hosts(2)
    make_job(LAYOUT, hosts=hosts, name="first").leave()  # what is made once has been made
    base = world.held_by(hosts.processes[0].pid)
    job = under_load(make_job, operation_bytes, hosts=hosts)
    full = world.held_by(hosts.processes[0].pid).resident
    hosts.processes[1].signal(signal.SIGKILL)
    for error in [*failed(job, [0, 1]), job.state(0)["error"]]:
        assert "host 1 (rank 2)" in error, error
    assert world.held_by(hosts.processes[0].pid).resident < full + SLACK
    gone = job.answers([2], timeout=30.0)[2]
    assert "daemon" in gone["error"], gone
    for rank in job.ranks.values():
        rank.end()
    job.close()
    assert_back_at(hosts.processes[0].pid, base)


def assert_back_at(pid, base):
    """The process holds no more than ``base`` again. Memory: the allocator may keep some."""

    def back():
        now = world.held_by(pid)
        return (now.descriptors, now.threads) == (
            base.descriptors,
            base.threads,
        ) and now.resident < base.resident + SLACK

    world.wait_for(back, 30.0, lambda: (world.held_by(pid), base))
    assert world.held_by(pid).mappings <= base.mappings + 8, (world.held_by(pid), base)


def test_cut_connection(make_job, operation_bytes):
    """One of the streams between two hosts breaks: both sides say with whom."""
    relays = []
    job = under_load(make_job, operation_bytes, relays=relays)
    used = next(relay for relay in relays if relay.pairs)
    used.cut(2)
    errors = failed(job, [0, 1, 2])
    assert any(re.search(r"host [01] \(ranks? [0-2, ]+\)", error) for error in errors), errors
    assert all("host 0" in error or "host 1" in error for error in errors), errors


def test_corrupt_stream(make_job, operation_bytes):
    """A flipped bit ends the job with an error that says so, and never gives a wrong result."""
    relays = []
    job = under_load(make_job, operation_bytes, relays=relays)
    next(relay for relay in relays if relay.pairs).corrupt()
    errors = failed(job, [0, 1, 2])
    assert all("checksum" in error for error in errors), errors
    assert all("host 0" in error or "host 1" in error for error in errors), errors


def test_killed_rank_takes_nothing_along(make_hosts, make_job, operation_bytes):
    """The rank's memory, descriptors and threads in its daemon go with the job."""
    hosts = make_hosts(2)
    make_job(LAYOUT, hosts=hosts, name="first").leave()
    base = [world.held_by(process.pid) for process in hosts.processes]
    job = under_load(make_job, operation_bytes, hosts=hosts)
    began = time.monotonic()
    pid = job.ranks[1].pid
    job.ranks[1].signal(signal.SIGKILL)
    for error in failed(job, [0, 2]):
        assert f"rank 1 (pid {pid})" in error, error
    assert time.monotonic() - began < 30.0
    for rank in job.ranks.values():
        rank.end()
    job.close()
    for process, held in zip(hosts.processes, base, strict=True):
        assert_back_at(process.pid, held)
