"""The order in which rings go round the hosts, from the bandwidths measured between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_relay import Relay

HOSTS = [[0], [1], [2], [3]]
CHUNK = {"chunk_bytes": 16384, "streams": 2}
COUNTS = [1003, 70_001]


@pytest.fixture
def connect() -> Iterator[Callable[..., Relay]]:
    """``connect(world, dialler, listener, rate)``: the world's hosts, that pair over a relay of ``rate`` bytes per
    second, stream and direction."""
    relays: list[Relay] = []

    def between(world: Any, dialler: int, listener: int, rate: float) -> Relay:
        addresses = [engine.address() for engine in world.engines]
        relays.append(Relay(addresses[listener]))
        relays[-1].rate = rate
        for host, engine in enumerate(world.engines):
            engine.set_peers(
                [relays[-1].address if (host, to) == (dialler, listener) else at for to, at in enumerate(addresses)]
            )
        return relays[-1]

    yield between
    for relay in relays:
        relay.close()


def told(world: Any) -> list[list[str]]:
    """The ring events of every host."""
    return [[event["text"] for event in engine.events() if event["kind"] == "ring"] for engine in world.engines]


def verify(world: Any, **arguments: Any) -> None:
    world.start("verify", **arguments)
    for result in world.lines().values():
        assert result["wrong"] == []
    assert [engine.error() for engine in world.engines] == [""] * len(world.engines)


@pytest.mark.parametrize(("slow", "order"), [((0, 1), "0 2 1 3"), ((2, 3), "0 2 1 3"), ((1, 2), "0 1 3 2")])
def test_a_slow_pair_is_no_neighbours(
    make_world: Callable[..., Any],
    connect: Callable[..., Relay],
    wait_for: Callable[..., None],
    slow: tuple[int, int],
    order: str,
) -> None:
    world = make_world(HOSTS, **CHUNK)
    relay = connect(world, *slow, rate=1e6)
    texts: list[list[str]] = [[] for _ in HOSTS]

    def all_told() -> bool:
        for known, new in zip(texts, told(world), strict=True):
            known += new
        return all(texts)

    wait_for(all_told, 30.0)
    relay.rate = 0.0
    verify(world, counts=COUNTS)
    assert told(world) == [[]] * 4  # once is enough
    assert texts == [texts[0]] * 4
    assert len(texts[0]) == 1
    assert re.fullmatch(rf"ring order {order}: slowest link [0-9.e+]+ [GM]bit/s", texts[0][0])
    world.stop()


def test_switched_off(make_world: Callable[..., Any], connect: Callable[..., Relay]) -> None:
    world = make_world(HOSTS, **CHUNK, measure_ring=False)
    connect(world, 0, 1, rate=0.0)
    verify(world, counts=COUNTS[:1])
    assert told(world) == [[]] * 4
    world.stop()


def test_three_hosts_have_one_ring(make_world: Callable[..., Any]) -> None:
    world = make_world(HOSTS[:3], **CHUNK)
    world.connect()
    verify(world, counts=COUNTS[:1])
    assert told(world) == [[]] * 3


def test_a_link_too_slow_to_be_measured(make_world: Callable[..., Any], connect: Callable[..., Relay]) -> None:
    world = make_world(HOSTS, **CHUNK)
    connect(world, 0, 1, rate=6e3)  # a measurement would take 8 s, the limit for all is 5 s
    world.start("call", calls=[[["allreduce", "float32", {"count": 100}]]] * 4)
    assert all("error" not in result for result in world.lines().values())
    assert told(world) == [["ring order 0 1 2 3: the measurement of their bandwidths took longer than 5.0 s"]] * 4
    world.stop()


def test_a_host_is_lost_during_the_measurement(
    make_world: Callable[..., Any], connect: Callable[..., Relay], wait_for: Callable[..., None]
) -> None:
    world = make_world(HOSTS, **CHUNK)
    world.start("call", calls=[[["allreduce", "float32", {"count": 100}]]] * 4)
    for engine in world.engines:  # the ranks are there before the time of the measurement begins to run
        wait_for(lambda engine=engine: any(event["kind"] == "joined" for event in engine.events()), 60.0)
    relay = connect(world, 0, 1, rate=6e3)
    waits = "until the order of the hosts' ring is known"
    wait_for(lambda: all(waits in engine.waiting(0.0) for engine in world.engines))
    wait_for(lambda: relay.taken > 10_000)  # more than all handshakes: those are tried again
    relay.reset()
    for result in world.lines().values():
        assert "all-reduce #0 of world" in result["error"]
        assert "lost host " in result["error"]
