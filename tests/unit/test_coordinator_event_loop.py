"""The coordinator's event loop stays free while many nodes speak. Turns and passes are counted: no times."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import grpc
import pytest

from bagua.base.security import call_metadata
from bagua.daemon.coordinator.counters import Counters
from bagua.daemon.coordinator.domain import HostRecord, RankRecord
from bagua.daemon.coordinator.event_loop import (
    IN_TURN,
    EventLoop,
    collect_seldom,
    is_prompt,
    prompt_task,
    wait_in_turn,
)
from bagua.daemon.coordinator.identity import bearer_of
from bagua.daemon.coordinator.interceptors import CallInterceptor

EVENTS = 600  # that come at once: the bell of grpc.aio holds some 280
MOST_TURNS = 100  # grpc.aio alone needs 200 more for each 280 events
TURN_S = 0.002  # so busy is the loop in each turn


async def turns_until_all_are_told() -> int:
    """Turns of a busy loop from the moment at which ``EVENTS`` events come to the last that is told."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            time.sleep(TURN_S)
            turns += 1
            await asyncio.sleep(0)

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        async with grpc.aio.insecure_channel("127.0.0.1:{1}".format(*nobody.getsockname())) as channel:
            idle = channel.get_state()
            told = asyncio.gather(*(channel.wait_for_state_change(idle) for _ in range(EVENTS)))
            await asyncio.sleep(0)  # all of them wait
            channel.get_state(try_to_connect=True)
            busy = asyncio.create_task(count())
            async with asyncio.timeout(60):
                await told
            busy.cancel()
    return turns


def test_events_do_not_wait_for_turns_of_the_loop() -> None:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        assert runner.run(turns_until_all_are_told()) < MOST_TURNS


class Crowd:
    """Tasks that are always ready, as streams of a thousand nodes are. ``steps`` counts what they did."""

    def __init__(self, size: int) -> None:
        self.steps = 0
        self.tasks = [asyncio.create_task(self._member()) for _ in range(size)]

    async def _member(self) -> None:
        while True:
            self.steps += 1
            await asyncio.sleep(0)

    def disperse(self) -> None:
        for task in self.tasks:
            task.cancel()


async def steps_of(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def started() -> None:
    for _ in range(10):
        await asyncio.create_task(steps_of(2))


async def met(crowd: Crowd, work: Coroutine[Any, Any, None]) -> int:
    """How many steps of the crowd ``work`` has waited for."""
    before = crowd.steps
    await work
    return crowd.steps - before


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(work)


def test_a_prompt_task_waits_for_few_others_in_each_step() -> None:
    async def work() -> None:
        crowd = Crowd(2_000)
        await asyncio.sleep(0)
        assert await prompt_task(met(crowd, steps_of(50))) <= 52 * IN_TURN < 50 * 2_000
        crowd.disperse()

    run(work())


def test_what_a_prompt_task_starts_is_prompt_until_it_waits_in_turn() -> None:
    async def streaming() -> None:
        wait_in_turn()
        await asyncio.create_task(steps_of(10))

    async def work() -> None:
        crowd = Crowd(2_000)
        await asyncio.sleep(0)
        assert await prompt_task(met(crowd, started())) <= 60 * IN_TURN
        assert await prompt_task(met(crowd, streaming())) >= 10 * 2_000  # it waited for all of them, ten times
        crowd.disperse()

    run(work())


def test_prompt_tasks_do_not_keep_others_from_their_turn() -> None:
    async def work() -> None:
        endless = prompt_task(steps_of(10**9))
        crowd = Crowd(200)
        async with asyncio.timeout(60):
            while crowd.steps < 20 * 200:
                await asyncio.sleep(0)
        crowd.disperse()
        endless.cancel()

    run(work())


class OpenDoor:
    """Counts nothing."""

    def admitted(self, peer: str) -> None: ...

    def refused(self, peer: str) -> None: ...


def test_calls_with_one_answer_are_prompt_and_streams_are_not() -> None:
    async def once(_: bytes, context: Any) -> bytes:
        return b"prompt" if is_prompt() else b"in turn"

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await once(request, context)

    async def work() -> None:
        handlers = {
            "Once": grpc.unary_unary_rpc_method_handler(once),
            "Stream": grpc.unary_stream_rpc_method_handler(stream),
        }
        interceptor = CallInterceptor(bearer_of("secret"), OpenDoor(), Counters(), 5.0)
        server = grpc.aio.server(interceptors=[interceptor])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await prompt_task(server.start())
        assert not is_prompt()
        metadata = call_metadata("secret")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.unary_unary("/test.Service/Once")(b"", metadata=metadata) == b"prompt"
            streamed = channel.unary_stream("/test.Service/Stream")(b"", metadata=metadata)
            assert [part async for part in streamed] == [b"in turn"]
        await server.stop(None)

    run(work())


@pytest.fixture
def collector() -> Iterator[None]:
    """As it was, afterwards."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_many_ranks_are_no_reason_for_a_full_pass_of_the_collector() -> None:
    collect_seldom()
    before = gc.get_stats()[2]["collections"]
    hosts = [
        HostRecord(
            host, f"n{host}", "h", "::1", "boot", 8 * host, 8, ranks=tuple(RankRecord(r, r, "n") for r in range(8))
        )
        for host in range(20_000)
    ]
    assert len(hosts) == 20_000 and gc.get_stats()[2]["collections"] == before
