"""Elastic jobs whose members change as planned: all follow after the same step, and nothing is repeated."""

from __future__ import annotations

import secrets
import select
from collections.abc import Callable
from typing import Any

import pytest
from rig.engines import DEADLINE_S

from bagua.csrc import load

COUNT = 1 << 12


def await_event(engine: Any, kind: str, **expected: Any) -> list[dict[str, Any]]:
    """Waits until the engine tells of it; all that it has told until then."""
    told: list[dict[str, Any]] = []
    while True:
        told += engine.events()
        if any(event["kind"] == kind and expected.items() <= event.items() for event in told):
            return told
        assert select.select([engine.event_fd()], [], [], DEADLINE_S)[0], f"no {kind} {expected}: {told}"


def newcomers(world: Any, members: list[int]) -> None:
    """Opens a lobby on the first host, and waits until all of it are ready."""
    world.tokens |= {member: secrets.token_bytes(32) for member in members}
    world.hosts[0] += members
    world.engines[0].open_lobby(members=members, tokens={member: world.tokens[member] for member in members})
    world.start("boundaries", only=members, count=COUNT)
    for rank, member in enumerate(members):
        view = world.line(member)["view"]
        assert (view["newcomer"], view["rank"], view["members"]) == (True, rank, members)
        assert world.line(member)["steps"] == 1
    told: list[dict[str, Any]] = []
    while not set(members) <= {e["rank"] for e in told if e["kind"] == "ready_to_join"}:
        told += await_event(world.engines[0], "ready_to_join")


def plan(world: Any, generation: int, by_host: dict[int, list[int]], out: tuple[int, ...] = ()) -> None:
    """The generation of these members, told to the engines of these hosts and to those that are ``out``."""
    members = [member for there in by_host.values() for member in there]
    hosts = [[members.index(member) for member in there] for there in by_host.values()]
    peers = [world.engines[host].address() for host in by_host]
    for index, host in enumerate(by_host):
        world.engines[host].plan(generation=generation, host_index=index, hosts=hosts, members=members, peers=peers)
    for host in out:
        world.engines[host].plan(generation=generation, host_index=-1)


def expect_entered(world: Any, generation: int, members: list[int]) -> None:
    for rank, member in enumerate(members):
        view = world.line(member)["view"]
        assert (view["generation"], view["rank"], view["members"]) == (generation, rank, members)
        assert view["newcomer"] is False


def expect_boundary(world: Any, generation: int, members: list[int], leaving: tuple[int, ...] = ()) -> None:
    """All of them have made the same number of steps, and ended none in vain. Those of a host that is ``leaving`` may
    learn that the others have gone on before their own flags have ended."""
    ends = [world.line(member) for member in members]
    assert all(end == ends[0] for end in ends) and ends[0]["newest"] == generation, ends
    for member in leaving:
        end = world.line(member)
        assert end == ends[0] or f"generation {generation} follows" in end["regrouped"], end


def test_members_come_and_go_on_one_host(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1]], elastic=True)
    world.start("boundaries", count=COUNT)
    expect_entered(world, 1, [0, 1])
    newcomers(world, [2, 3])
    plan(world, 2, {0: [0, 1, 2, 3]})
    expect_boundary(world, 2, [0, 1])
    expect_entered(world, 2, [0, 1, 2, 3])
    told = await_event(world.engines[0], "regrouped", generation=2)
    assert not [event for event in told if event["kind"] in ("suspended", "error")]

    plan(world, 4, {0: [3, 1]})
    expect_boundary(world, 4, [0, 1, 2, 3])
    for member in (0, 2):
        assert "as was planned" in world.line(member)["dismissed"]
        world.ranks[member].process.wait(DEADLINE_S)
    expect_entered(world, 4, [3, 1])

    world.engines[0].plan(generation=5, hold=True)
    expect_boundary(world, 5, [3, 1])
    world.engines[0].plan(generation=5, hold=True)  # told again
    plan(world, 6, {0: [3, 1]})
    expect_entered(world, 6, [3, 1])
    told = await_event(world.engines[0], "regrouped", generation=6)
    assert not [event for event in told if event["kind"] in ("suspended", "error")]
    assert world.engines[0].error() == ""


def test_hosts_come_and_go(make_world: Callable[..., Any]) -> None:
    """A second host joins, and the first one leaves."""
    world = make_world([[0, 1]], elastic=True)
    world.start("boundaries", count=COUNT)
    expect_entered(world, 1, [0, 1])
    world.add_host([2])
    world.start("boundaries", only=[2], count=COUNT)
    assert world.line(2)["view"]["newcomer"] is True and world.line(2)["steps"] == 1
    await_event(world.engines[1], "ready_to_join", rank=2)
    plan(world, 2, {0: [0, 1], 1: [2]})
    expect_boundary(world, 2, [0, 1])
    expect_entered(world, 2, [0, 1, 2])
    told = [event for engine in world.engines for event in await_event(engine, "regrouped", generation=2)]
    assert not [event for event in told if event["kind"] == "error"]

    plan(world, 3, {1: [2]}, out=(0,))
    expect_boundary(world, 3, [2], leaving=(0, 1))
    expect_entered(world, 3, [2])
    for member in (0, 1):
        assert "as was planned" in world.line(member)["dismissed"]
    await_event(world.engines[0], "regrouped", generation=3)
    world.engines[0].close()
    world.engines[1].plan(generation=4, hold=True)
    expect_boundary(world, 4, [2])
    assert [engine.error() for engine in world.engines[1:]] == [""]


def test_a_newcomer_is_lost_before_it_joins(make_world: Callable[..., Any]) -> None:
    """The others do not notice, and another one may try."""
    world = make_world([[0, 1]], elastic=True)
    world.start("boundaries", count=COUNT)
    expect_entered(world, 1, [0, 1])
    newcomers(world, [2])
    with pytest.raises(load().CoreError, match="member 2 is still in the lobby"):
        world.engines[0].open_lobby(members=[3], tokens={3: b"t" * 32})
    world.kill(2)
    told = await_event(world.engines[0], "lost", rank=2)
    assert "suspended" not in [event["kind"] for event in told]
    newcomers(world, [3, 4])
    plan(world, 2, {0: [0, 3, 1, 4]})
    expect_boundary(world, 2, [0, 1])
    expect_entered(world, 2, [0, 3, 1, 4])


def test_a_loss_takes_the_place_of_a_plan(make_world: Callable[..., Any]) -> None:
    """One is killed while all wait at the boundary: the next generation has all that are left of old and new ones."""
    world = make_world([[0, 1, 2]], elastic=True)
    world.start("boundaries", count=COUNT)
    expect_entered(world, 1, [0, 1, 2])
    newcomers(world, [3])
    world.engines[0].plan(generation=3, hold=True)
    expect_boundary(world, 3, [0, 1, 2])
    world.kill(1)
    await_event(world.engines[0], "suspended", rank=1)
    with pytest.raises(load().CoreError, match="3 is planned already"):
        world.engines[0].regroup(generation=2, host_index=0, hosts=[[0]])
    world.engines[0].regroup(generation=4, host_index=0, hosts=[[0, 1, 2]], members=[0, 2, 3])
    expect_entered(world, 4, [0, 2, 3])


def test_plans_that_can_not_follow(make_world: Callable[..., Any]) -> None:
    world = make_world([[0]], elastic=True)
    engine = world.engines[0]
    engine.plan(generation=5, hold=True)
    for arguments, words in (
        ({"generation": 1, "hold": True}, "does not come after 1"),
        ({"generation": 4, "hold": True}, "5 is planned already"),
        ({"generation": 6, "hosts": [[0, 1]], "peers": [""]}, "member 1 needs a token"),
        ({"generation": 6, "hosts": [[0]], "peers": []}, "0 addresses for the 1 hosts"),
        ({"generation": 6, "hosts": [[0]], "peers": [""], "host_index": 1}, "host_index 1"),
    ):
        with pytest.raises(load().CoreError, match=words):
            engine.plan(**arguments)
    with pytest.raises(load().CoreError, match="is no newcomer"):
        engine.open_lobby(members=[0], tokens={0: b"t" * 32})
    with pytest.raises(load().CoreError, match="needs a token"):
        engine.open_lobby(members=[1], tokens={})
    fixed = make_world([[0]]).engines[0]
    with pytest.raises(load().CoreError, match="not elastic"):
        fixed.plan(generation=2, hold=True)
    with pytest.raises(load().CoreError, match="not elastic"):
        fixed.open_lobby(members=[1], tokens={1: b"t" * 32})
    with pytest.raises(load().CoreError, match="join an elastic job"):
        make_world([[0]], newcomers=True)
