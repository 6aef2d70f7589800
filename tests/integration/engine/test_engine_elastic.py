"""Elastic jobs: processes are killed, the others go on in the next generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

COUNT = 1 << 20  # float32: the whole segment of a worker


def regroup(world: Any, generation: int, members: list[int]) -> None:
    """As a node daemon does when the coordinator has formed a generation of these members, all on one host."""
    world.engines[0].regroup(
        generation=generation, host_index=0, hosts=[list(range(len(members)))], members=members, tokens={}
    )


def expect_views(world: Any, generation: int, members: list[int]) -> None:
    """All of them have entered, and had a right result."""
    for rank, member in enumerate(members):
        view = world.line(member)["view"]
        assert view == {
            "generation": generation,
            "rank": rank,
            "hosts": [list(range(len(members)))],
            "members": members,
        }


@pytest.mark.parametrize("idle", [False, True], ids=["at work", "others wait for it"])
def test_losses_until_one_is_left(make_world: Callable[..., Any], idle: bool) -> None:
    world = make_world([[0, 1, 2, 3]], elastic=True)
    world.start("through", count=COUNT, idle=idle)
    members = [0, 1, 2, 3]
    expect_views(world, 1, members)
    for generation, gone in enumerate([1, 3, 0], start=2):
        rank = members.index(gone)
        world.kill(gone)
        members.remove(gone)
        for member in members:
            name = f"rank {rank}" if rank == gone else f"rank {rank} (member {gone})"
            assert world.line(member)["regrouped"].startswith(f"{name} (pid {world.ranks[gone].pid}) went away")
        events = [event for event in world.engines[0].events() if event["kind"] in ("suspended", "error")]
        assert [(event["kind"], event["rank"], event["host"]) for event in events] == [("suspended", gone, -1)]
        assert world.engines[0].error() == ""
        regroup(world, generation, members)
        expect_views(world, generation, members)


def test_the_same_members_go_on(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1, 2]], elastic=True)
    world.start("through", count=COUNT)
    expect_views(world, 1, [0, 1, 2])
    for generation in (2, 5, 6):
        regroup(world, generation, [0, 1, 2])
        for member in range(3):
            assert f"generation {generation} follows" in world.line(member)["regrouped"]
        expect_views(world, generation, [0, 1, 2])
