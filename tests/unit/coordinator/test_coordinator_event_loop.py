"""The coordinator's event loop stays free while many nodes speak. Turns and passes are counted: no times."""

import asyncio
import socket
import time

import grpc

from bagua.daemon.coordinator.host.event_loop import EventLoop

EVENTS = 600  # that come at once: the bell of grpc.aio holds some 280
MOST_TURNS = 100  # grpc.aio alone needs 200 more for each 280 events
TURN_S = 0.002  # so busy is the loop in each turn


async def turns_until_all_are_told():
    """Turns of a busy loop from the moment at which ``EVENTS`` events come to the last that is told."""
    turns = 0

    async def count():
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


def test_events_do_not_wait_for_turns_of_the_loop():
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        assert runner.run(turns_until_all_are_told()) < MOST_TURNS
