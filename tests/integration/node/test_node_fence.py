"""A daemon that can't be sure to be heard ends its ranks, so that the coordinator may run their job elsewhere."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time

import psutil
import pytest

from bagua.base.machine_clock import STANDSTILL_S
from bagua.daemon.node.session.fence import LOOK_S
from bagua.proto import common_pb2, node_pb2

from .test_node_engine import JOIN

FENCE_S = 1.5
WORDS = f"node n could not reach the coordinator for {FENCE_S:g} s: its ranks were ended"
WITH_CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


def unused_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def running(end, script, nproc=2, job_id="job", **spec):
    """A job that runs, each rank with a child: (pids of the ranks, pids of all)."""
    await end.run_script(job_id, script(WITH_CHILD), nproc=nproc, **spec)

    def complete(job):
        ranks = [rank.pid for rank in job.ranks if rank.state == common_pb2.RANK_STATE_RUNNING]
        return len(ranks) == nproc

    job = await end.job_until(job_id, complete)
    ranks = [rank.pid for rank in job.ranks]
    while not all(psutil.Process(rank).children() for rank in ranks):
        await asyncio.sleep(0.02)
    return ranks, [*ranks, *(child.pid for rank in ranks for child in psutil.Process(rank).children())]


LONG_S = 4.0
LONG_WORDS = WORDS.replace(f"{FENCE_S:g}", f"{FENCE_S + LONG_S:g}")


@pytest.mark.parametrize("who", ["the daemon", "its keeper"])
async def test_each_job_has_its_own_time(end, daemon, script, until_gone, alive, who):
    """That of one with long steps is longer: hosts wait for each other meanwhile."""
    _, short = await running(end, script, nproc=1, job_id="short")
    _, long = await running(end, script, nproc=1, job_id="long", patience_s=LONG_S)
    await end.welcome_again(fence_s=FENCE_S)
    known = end.acknowledged
    await end.until(lambda: end.acknowledged > known)
    end.acknowledges = False
    began = time.monotonic()
    if who == "its keeper":
        daemon.proper().suspend()
    try:
        await until_gone(short, 60)
        assert all(alive(pid) for pid in long)
        await until_gone(long, 60)
        assert time.monotonic() - began > LONG_S
    finally:
        daemon.proper().resume()
    assert WORDS in (await end.stopped("short")).error
    assert LONG_WORDS in (await end.stopped("long")).error


async def test_a_daemon_that_is_stopped(end, daemon, script, until_gone, alive):
    """Its keeper ends the ranks; a directive that lay unread meanwhile is not followed."""
    _, pids = await running(end, script)
    await end.welcome_again(fence_s=FENCE_S)
    known = end.acknowledged
    await end.until(lambda: end.acknowledged > known)
    proper = daemon.proper()
    proper.suspend()
    try:
        await until_gone(pids, 60)
        assert end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STARTED
        await asyncio.sleep(FENCE_S)  # an acknowledgement that lies unread is old as well by then
        await end.run_script("late", script(WITH_CHILD))
    finally:
        proper.resume()
    last = await end.stopped("job")
    assert WORDS in last.error
    await end.welcome_again()
    assert all(job.job_id != "late" for job in end.hellos[-1].jobs)
    assert "an old directive is not followed" in daemon.log()
    await end.run_script("later", script(""))
    await end.exited("later")


TICKS = """
import sys, time
while True:
    with open(sys.argv[1], "a") as file:
        file.write(".")
    time.sleep(0.02)
"""


async def asleep(end, daemon, script, ticks, sleeps_on=None, **spec):
    """A job that computes, and everything that belongs to the node is stopped for longer than a fence: its ranks."""
    await end.run_script("job", script(TICKS), args=[str(ticks)], **spec)
    ranks = (await end.job_until("job", lambda job: all(rank.pid for rank in job.ranks))).ranks
    await end.welcome_again(fence_s=FENCE_S)
    known = end.acknowledged
    await end.until(lambda: end.acknowledged > known and ticks.exists())
    end.acknowledges = False
    keeper = psutil.Process(daemon.pid)
    sleepers = [keeper, *keeper.children(recursive=True)]
    for process in sleepers:
        process.suspend()
    await asyncio.sleep(2 * FENCE_S + STANDSTILL_S)
    for process in sleepers:
        if process != sleeps_on:
            process.resume()
    return [rank.pid for rank in ranks]


async def still(ranks, ticks):
    """How far the ranks had come when they were stopped again, or ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in ranks):
            await asyncio.sleep(0.02)
    return ticks.stat().st_size


async def test_ranks_of_a_node_that_wakes_up_wait_for_an_answer(end, daemon, script, alive, tmp_path):
    ticks = tmp_path / "ticks"
    ranks = await asleep(end, daemon, script, ticks, elastic=True)
    computed = await still(ranks, ticks)
    end.acknowledges = True
    while ticks.stat().st_size == computed:
        await asyncio.sleep(0.02)
    assert all(alive(pid) for pid in ranks) and end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STARTED
    assert "the coordinator has answered: ranks go on" in daemon.log()


async def test_a_node_that_wakes_up_without_a_coordinator_ends_its_ranks(end, daemon, script, until_gone, tmp_path):
    ticks = tmp_path / "ticks"
    ranks = await asleep(end, daemon, script, ticks)
    computed = await still(ranks, ticks)
    await until_gone(ranks, 60)
    assert ticks.stat().st_size == computed
    assert WORDS in (await end.stopped("job")).error


async def test_ranks_that_were_given_up_meanwhile_do_nothing_more(end, daemon, script, until_gone, tmp_path):
    ticks = tmp_path / "ticks"
    ranks = await asleep(end, daemon, script, ticks)
    computed = await still(ranks, ticks)
    end.acknowledges = True
    await end.stop_job("job", grace_s=600.0)
    await until_gone(ranks, 60)
    assert ticks.stat().st_size == computed


@pytest.mark.parametrize("who", ["the keeper", "the daemon"])
async def test_whoever_wakes_up_first_holds_the_ranks(end, daemon, script, until_gone, tmp_path, who):
    """The other one sleeps on; then nobody answers. Ranks that somebody else continues are stopped again."""
    ticks = tmp_path / "ticks"
    sleeps_on = psutil.Process(daemon.pid) if who == "the daemon" else daemon.proper()
    ranks = await asleep(end, daemon, script, ticks, sleeps_on=sleeps_on)
    try:
        await still(ranks, ticks)
        for pid in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).resume()
        computed = await still(ranks, ticks)
        if who == "the keeper":
            await until_gone(ranks, 60)
    finally:
        sleeps_on.resume()
    await until_gone(ranks, 60)
    assert ticks.stat().st_size == computed
    assert WORDS in (await end.stopped("job")).error


@pytest.mark.parametrize("given_up", [False, True])
async def test_ranks_whose_daemon_and_keeper_are_stopped(end, daemon, script, until_gone, tmp_path, given_up):
    """They stop themselves, and go on, or end, when these wake up."""
    ticks = tmp_path / "ticks"
    await end.run_script("job", script(JOIN + TICKS), args=[str(ticks)])
    job = await end.job_until("job", lambda job: all(rank.pid for rank in job.ranks))
    ranks = [rank.pid for rank in job.ranks]
    await end.welcome_again(fence_s=FENCE_S)
    known = end.acknowledged
    await end.until(lambda: end.acknowledged > known and ticks.exists())
    keeper, proper = psutil.Process(daemon.pid), daemon.proper()
    keeper.suspend()
    proper.suspend()
    try:
        computed = await still(ranks, ticks)
        await asyncio.sleep(STANDSTILL_S + LOOK_S)
        assert ticks.stat().st_size == computed
        if given_up:
            await end.stop_job("job", grace_s=600.0)
    finally:
        proper.resume()
        keeper.resume()
    if given_up:
        await until_gone(ranks, 60)
        assert ticks.stat().st_size == computed
    else:
        while ticks.stat().st_size == computed:
            await asyncio.sleep(0.02)
        assert end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STARTED


def test_an_acknowledgement_that_is_read_too_late(tmp_path):
    """It moves the deadline of a daemon whose ranks the keeper has ended; the reason is told all the same."""
    script = tmp_path / "daemon.py"
    script.write_text(READS_TOO_LATE)
    keeper = (
        f"from bagua.daemon.node.keeper.keeper import Keeper\nimport sys\ncommand = [sys.executable, {str(script)!r}]\n"
    )
    keeper += "sys.exit(Keeper(lambda fd, first: ([*command, str(fd)], []), restart=False).run())\n"
    subprocess.run([sys.executable, "-c", keeper], check=True, timeout=60)


READS_TOO_LATE = """
import asyncio, os, signal, sys, structlog
from bagua.daemon.node.session.fence import Fence
from bagua.daemon.node.keeper.link import KeeperLink
from bagua.base.machine_clock import boottime
from bagua.proto import node_pb2

async def main():
    said = []
    keeper = KeeperLink(int(sys.argv[1]))
    await keeper.receive_state()
    ends, fences = lambda job, text: said.append(text), lambda job, at, held: None
    fence = Fence(keeper, lambda: {"job": 0.0}, ends, fences, structlog.get_logger())
    reader, writer = os.pipe()
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    pid = await keeper.spawn("job/0", argv, dict(os.environ), "/", (writer, writer), (reader, reader))
    os.close(writer)
    fence.lease.hello(boottime())
    fence.lease.welcome(node_pb2.Welcome(lease_s=60, fence_s=1))
    while not (beat := fence.lease.beat(boottime())):
        pass
    os.read(reader, 1)  # this process does nothing else until its keeper has ended the rank
    fence.lease._sent[beat] = boottime()  # as late as can be: the clock alone would say that nothing is over
    fence.lease.acknowledged(beat)
    assert not fence.over() and len(said) == 1 and "could not reach the coordinator for 1 s" in said[0], said
    assert not fence.over() and len(said) == 1, said
    codes = []
    keeper.watch(pid, codes.append)
    while not codes:
        await asyncio.sleep(0.01)
    assert codes == [-signal.SIGKILL]

asyncio.run(main())
"""


async def test_a_daemon_that_is_killed_keeps_its_deadline(end, daemon, script, until_gone):
    """The next one can't reach the coordinator, and knows of no lease: the keeper does."""
    _, pids = await running(end, script, elastic=True)
    await end.welcome_again(fence_s=FENCE_S)
    known = end.acknowledged
    await end.until(lambda: end.acknowledged > known)  # so the daemon knows its lease
    await end.stop()
    daemon.proper().kill()
    await until_gone(pids, 60)


async def test_the_next_daemon_is_heard_while_the_database_is_away(end, daemon, script, alive):
    """The one before was killed. Its Hello can't be written down, but its lease goes on."""
    fence_s = 4.0  # the next one has to start within it
    _, pids = await running(end, script, elastic=True)
    await end.welcome_again(fence_s=fence_s)
    known = end.acknowledged
    await end.until(lambda: end.acknowledged > known)  # so the keeper knows a deadline
    end.database_away = True
    daemon.proper().kill()
    await end.until(lambda: end.hellos[-1].life == 2 and end.hellos[-1].waits)
    known = end.acknowledged
    reported = len(end.history)
    await asyncio.sleep(1.5 * fence_s)
    assert all(alive(pid) for pid in pids)
    assert end.acknowledged > known and len(end.history) == reported, "it says nothing but that it is there"
    hellos = len(end.hellos)
    await end.send(welcome=node_pb2.Welcome(heartbeat_s=end.heartbeat_s, lease_s=5, fence_s=fence_s))
    await end.run_script("later", script(""))
    await end.exited("later")
    assert len(end.hellos) == hellos, "the same stream goes on"
    assert all(alive(pid) for pid in pids)


async def test_coordinators_that_are_all_down_end_nothing(end, daemon, script, alive):
    _, pids = await running(end, script)
    other = unused_address()
    grant = node_pb2.LeaseGrant(refusals_s=600, coordinators=[f"127.0.0.1:{end.port}", other])
    await end.welcome_again(fence_s=FENCE_S, grant=grant)
    await end.stop()
    await asyncio.sleep(3 * FENCE_S)
    assert all(alive(pid) for pid in pids)
    await end.start()
    known = len(end.hellos)
    await end.until(lambda: len(end.hellos) > known)
    assert [job.phase for job in end.hellos[-1].jobs] == [node_pb2.LOCAL_PHASE_STARTED]


async def test_another_coordinator_that_listens_may_decide(end, daemon, script, until_gone):
    _, pids = await running(end, script)
    with socket.create_server(("127.0.0.1", 0)) as other:
        grant = node_pb2.LeaseGrant(refusals_s=600, coordinators=[f"127.0.0.1:{other.getsockname()[1]}"])
        await end.welcome_again(fence_s=FENCE_S, grant=grant)
        await end.stop()
        await until_gone(pids, 60)
    await end.start()
    assert WORDS in (await end.stopped("job")).error


async def test_a_coordinator_that_has_lost_its_database_may_be_replaced(end, daemon, script, until_gone):
    """It acknowledges, but others count from its last beat."""
    _, pids = await running(end, script)
    known = end.acknowledged
    await end.welcome_again(fence_s=FENCE_S, grant=node_pb2.LeaseGrant(age_s=2 * FENCE_S))
    await until_gone(pids, 60)
    assert WORDS in (await end.stopped("job")).error
    await end.until(lambda: end.acknowledged > known)  # the ranks may have ended before the first heartbeat


async def test_a_port_that_is_silent(end, daemon, script, until_gone):
    """Somebody listens there, and may have given this node up."""
    _, pids = await running(end, script)
    await end.welcome_again(fence_s=FENCE_S, sole=True)
    await end.stop()
    with socket.create_server(("127.0.0.1", end.port)):
        await until_gone(pids, 60)
    await end.start()
    assert WORDS in (await end.stopped("job")).error
