"""A daemon that has run many jobs, and has lost its coordinator many times, has no more descriptors than before."""

import asyncio
import contextlib
import gc
import os
from collections import Counter

import structlog
from rig.limits import SOON_S

from bagua.daemon.node.session.lease import Lease
from bagua.daemon.node.session.session import Endpoint, Session
from bagua.proto import node_pb2

ROUNDS = 6


def descriptors(pid):
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def held(pid):
    """Kinds of descriptors of a process, with how many it has of each."""
    return Counter(target.partition(":[")[0] for target in descriptors(pid))


async def until_connection_is_kept(keeper, proper):
    """The keeper gets a copy of the daemon's connection to the coordinator a moment after that was made."""
    async with asyncio.timeout(SOON_S):
        while not any(target.startswith("socket:") for target in {*descriptors(keeper)} & {*descriptors(proper)}):
            await asyncio.sleep(0.05)


async def until_no_more(pid, before):
    """Waits for what is being closed. ``before`` may have had something in passing: it is the most that is allowed."""
    try:
        async with asyncio.timeout(SOON_S):
            while held(pid).total() > before.total():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"descriptors that were not there before: {held(pid) - before}") from None


async def run_jobs(end, first):
    """One after the other, each with a reader of its output."""
    for number in range(first, first + ROUNDS):
        await end.run_script(f"job-{number}", "/bin/true", no_python=True)
        await end.send(read_log=node_pb2.ReadLog(request_id=number, job_id=f"job-{number}", rank=0, follow=True))
        await end.exited(f"job-{number}")
        await end.end_job(f"job-{number}")
        await end.until(lambda: number in end.log_ends)  # noqa: B023  # awaited here


async def reconnect(end, first):
    """The stream ends, or the coordinator is away for a while, with a reader of a job that goes on."""
    for number in range(first, first + ROUNDS):
        known = len(end.hellos)
        await end.send(read_log=node_pb2.ReadLog(request_id=1000 + number, job_id="stays", rank=0, follow=True))
        if number % 2:
            await end.welcome_again()
        else:
            await end.stop()
            await end.start()
        await end.until(lambda: len(end.hellos) > known)  # noqa: B023  # awaited here


async def test_descriptors_do_not_grow(end, daemon):
    pids = (daemon.pid, daemon.proper().pid)
    await end.run_script("stays", "/bin/sleep", no_python=True, args=["600"])
    for work in (run_jobs, reconnect):
        await work(end, 0)
        await until_connection_is_kept(*pids)
        before = [held(pid) for pid in pids]
        await work(end, ROUNDS)
        for pid, kinds in zip(pids, before, strict=True):
            await until_no_more(pid, kinds)


async def test_a_stream_that_ends_with_an_error_keeps_no_connection(end, state):
    """Not even until the garbage collector comes, which may be long."""
    session = Session(
        Endpoint(f"127.0.0.1:{end.port}", state / "token", None),
        hello=lambda: node_pb2.Hello(node_id="n"),
        snapshot=lambda job_id: None,
        status=node_pb2.NodeStatus,
        on_directive=lambda directive: None,
        on_connection=lambda connected: None,
        lease=Lease(lambda: None),
        log=structlog.get_logger(),
    )
    gc.disable()
    running = asyncio.ensure_future(session.run())
    try:
        await end.until(lambda: end.hellos)
        before = held(os.getpid())
        for _ in range(ROUNDS):
            await end.welcome_again(error="nothing was heard of this daemon")
        await until_no_more(os.getpid(), before)
    finally:
        gc.enable()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
