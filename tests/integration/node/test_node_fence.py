"""A daemon that can't be sure to be heard ends its ranks, so that the coordinator may run their job elsewhere."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time

import psutil
import pytest
from rig.node_daemon import alive, until_gone
from rig.ranks.elastic import JOIN

from bagua.base.machine_clock import STANDSTILL_S
from bagua.daemon.node.session.fence import LOOK_S
from bagua.proto import node_pb2

FENCE_S, LONG_S = 1.5, 4.0
WORDS = f"node n could not reach the coordinator for {FENCE_S:g} s: its ranks were ended"
LONG_WORDS = WORDS.replace(f"{FENCE_S:g}", f"{FENCE_S + LONG_S:g}")
WITH_CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""
TICKS = """
import sys, time
while True:
    with open(sys.argv[1], "a") as file:
        file.write(".")
    time.sleep(0.02)
"""


async def running(end, script, job_id="job", **spec):
    """A job that runs, its rank with a child: the processes of both."""
    await end.run_script(job_id, script(WITH_CHILD), **spec)
    (rank,) = (await end.runs(job_id)).ranks
    while not (children := psutil.Process(rank.pid).children()):
        await asyncio.sleep(0.02)
    return [rank.pid, *(child.pid for child in children)]


@pytest.mark.parametrize("who", ["the daemon", "its keeper"])
async def test_each_job_has_its_own_time(end, daemon, script, who):
    """That of one with long steps is longer: hosts wait for each other meanwhile."""
    short = await running(end, script, "short")
    long = await running(end, script, "long", patience_s=LONG_S)
    await end.welcome_again(fence_s=FENCE_S)
    await end.renewed()
    end.acknowledges = False
    began = time.monotonic()
    if who == "its keeper":
        daemon.proper().suspend()
    try:
        await until_gone(short)
        assert all(alive(pid) for pid in long)
        await until_gone(long)
        assert time.monotonic() - began > LONG_S
    finally:
        daemon.proper().resume()
    assert WORDS in (await end.stopped("short")).error
    assert LONG_WORDS in (await end.stopped("long")).error


async def test_a_daemon_that_is_stopped(end, daemon, script):
    """Its keeper ends the ranks; a directive that lay unread meanwhile is not followed."""
    pids = await running(end, script)
    await end.welcome_again(fence_s=FENCE_S)
    await end.renewed()
    proper = daemon.proper()
    proper.suspend()
    try:
        await until_gone(pids)
        assert end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STARTED
        await asyncio.sleep(FENCE_S)  # an acknowledgement that lies unread is old as well by then
        await end.run_script("late", script(WITH_CHILD))
    finally:
        proper.resume()
    assert WORDS in (await end.stopped("job")).error
    await end.welcome_again()
    assert all(job.job_id != "late" for job in end.hellos[-1].jobs)
    assert "an old directive is not followed" in daemon.log()
    await end.run_script("later", script(""))
    await end.exited("later")


class Asleep:
    """A job that computes, on a node of which everything is stopped for longer than a fence: its ranks."""

    def __init__(self, end, daemon, script, ticks):
        self.end, self.daemon, self.script, self.ticks = end, daemon, script, ticks

    async def begin(self, text=TICKS, **spec):
        await self.end.run_script("job", self.script(text), args=[str(self.ticks)], **spec)
        self.ranks = [rank.pid for rank in (await self.end.runs()).ranks]
        await self.end.welcome_again(fence_s=FENCE_S)
        await self.end.renewed()
        while not self.ticks.exists():
            await asyncio.sleep(0.02)

    async def sleep(self, sleeps_on=None, **spec):
        await self.begin(**spec)
        self.end.acknowledges = False
        keeper = psutil.Process(self.daemon.pid)
        sleepers = [keeper, *keeper.children(recursive=True)]
        for process in sleepers:
            process.suspend()
        await asyncio.sleep(2 * FENCE_S + STANDSTILL_S)
        for process in sleepers:
            if process != sleeps_on:
                process.resume()
        self.computed = await self.still()

    async def still(self):
        """How far the ranks had come when they were stopped again, or ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            while any(psutil.Process(pid).status() != psutil.STATUS_STOPPED for pid in self.ranks):
                await asyncio.sleep(0.02)
        return self.ticks.stat().st_size

    async def goes_on(self):
        while self.ticks.stat().st_size == self.computed:
            await asyncio.sleep(0.02)
        assert all(alive(pid) for pid in self.ranks) and self.end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STARTED

    async def is_gone(self):
        await until_gone(self.ranks)
        assert self.ticks.stat().st_size == self.computed


@pytest.fixture
def node(end, daemon, script, tmp_path):
    return Asleep(end, daemon, script, tmp_path / "ticks")


async def test_ranks_of_a_node_that_wakes_up_wait_for_an_answer(end, daemon, node):
    await node.sleep(elastic=True)
    end.acknowledges = True
    await node.goes_on()
    assert "the coordinator has answered: ranks go on" in daemon.log()


@pytest.mark.parametrize("given_up", [False, True])
async def test_ranks_that_get_no_good_answer_do_nothing_more(end, daemon, node, given_up):
    """The coordinator is away, or has given them up meanwhile."""
    await node.sleep()
    if given_up:
        end.acknowledges = True
        await end.stop_job("job", grace_s=600.0)
    await node.is_gone()
    assert given_up or WORDS in (await end.stopped("job")).error


@pytest.mark.parametrize("who", ["the keeper", "the daemon"])
async def test_whoever_wakes_up_first_holds_the_ranks(end, daemon, node, who):
    """The other one sleeps on; then nobody answers. Ranks that somebody else continues are stopped again."""
    sleeps_on = psutil.Process(daemon.pid) if who == "the daemon" else daemon.proper()
    await node.sleep(sleeps_on)
    try:
        for pid in node.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).resume()
        node.computed = await node.still()
        if who == "the keeper":
            await until_gone(node.ranks)
    finally:
        sleeps_on.resume()
    await node.is_gone()
    assert WORDS in (await end.stopped("job")).error


@pytest.mark.parametrize("given_up", [False, True])
async def test_ranks_whose_daemon_and_keeper_are_stopped(end, daemon, node, given_up):
    """They stop themselves, and go on, or end, when these wake up."""
    await node.begin(JOIN + TICKS)
    keeper, proper = psutil.Process(daemon.pid), daemon.proper()
    keeper.suspend()
    proper.suspend()
    try:
        node.computed = await node.still()
        await asyncio.sleep(STANDSTILL_S + LOOK_S)
        assert node.ticks.stat().st_size == node.computed
        if given_up:
            await end.stop_job("job", grace_s=600.0)
    finally:
        proper.resume()
        keeper.resume()
    await (node.is_gone() if given_up else node.goes_on())


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


async def test_a_daemon_that_is_killed_keeps_its_deadline(end, start_daemon, script):
    """The next one can't reach the coordinator, and knows of no lease: the keeper does."""
    daemon = await start_daemon()
    pids = await running(end, script, elastic=True)
    await end.welcome_again(fence_s=FENCE_S)
    await end.renewed()
    await end.stop()
    daemon.proper().kill()
    await until_gone(pids)


async def test_the_next_daemon_is_heard_while_the_database_is_away(end, start_daemon, script):
    """The one before was killed. Its Hello can't be written down, but its lease goes on."""
    daemon = await start_daemon()
    fence_s = 15.0  # the next one has to start within it
    pids = await running(end, script, elastic=True)
    await end.welcome_again(fence_s=fence_s)
    await end.renewed()  # so the keeper knows a deadline
    end.database_away = True
    daemon.proper().kill()
    await end.until(lambda: end.hellos[-1].life == 2 and end.hellos[-1].waits)
    known, reported = end.acknowledged, len(end.history)
    await asyncio.sleep(1.2 * fence_s)
    assert all(alive(pid) for pid in pids)
    assert end.acknowledged > known and len(end.history) == reported, "it says nothing but that it is there"
    hellos = len(end.hellos)
    await end.send(welcome=node_pb2.Welcome(**end.terms))
    await end.run_script("later", script(""))
    await end.exited("later")
    assert len(end.hellos) == hellos, "the same stream goes on"
    assert all(alive(pid) for pid in pids)


async def test_coordinators_that_are_all_down_end_nothing(end, daemon, script):
    pids = await running(end, script)
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = f"127.0.0.1:{server.getsockname()[1]}"  # nobody listens there any more
    grant = node_pb2.LeaseGrant(refusals_s=600, coordinators=[f"127.0.0.1:{end.port}", other])
    await end.welcome_again(fence_s=FENCE_S, grant=grant)
    await end.stop()
    await asyncio.sleep(3 * FENCE_S)
    assert all(alive(pid) for pid in pids)
    await end.start()
    known = len(end.hellos)
    await end.until(lambda: len(end.hellos) > known)
    assert [job.phase for job in end.hellos[-1].jobs] == [node_pb2.LOCAL_PHASE_STARTED]


@pytest.mark.parametrize("sole", [False, True], ids=["another coordinator", "a port that is silent"])
async def test_whoever_listens_may_decide(end, daemon, script, sole):
    """And may have given this node up."""
    pids = await running(end, script)
    if sole:
        await end.welcome_again(fence_s=FENCE_S, sole=True)
        await end.stop()
    with socket.create_server(("127.0.0.1", end.port if sole else 0)) as other:
        if not sole:
            grant = node_pb2.LeaseGrant(refusals_s=600, coordinators=[f"127.0.0.1:{other.getsockname()[1]}"])
            await end.welcome_again(fence_s=FENCE_S, grant=grant)
            await end.stop()
        await until_gone(pids)
    await end.start()
    assert WORDS in (await end.stopped("job")).error


async def test_a_coordinator_that_has_lost_its_database_may_be_replaced(end, daemon, script):
    """It acknowledges, but others count from its last beat."""
    pids = await running(end, script)
    known = end.acknowledged
    await end.welcome_again(fence_s=FENCE_S, grant=node_pb2.LeaseGrant(age_s=2 * FENCE_S))
    await until_gone(pids)
    assert WORDS in (await end.stopped("job")).error
    await end.until(lambda: end.acknowledged > known)  # the ranks may have ended before the first heartbeat
