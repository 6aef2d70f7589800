"""`bagua chaos`: the order of faults, and what it judges."""

from __future__ import annotations

import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from bagua.base.errors import ConfigError
from bagua.chaos import sockets
from bagua.chaos.diary import Diaries, Diary, Epoch, longest_pause, usual_step, violations, whole_epochs
from bagua.chaos.plan import KINDS, Plan, choose


def test_each_kind_comes_once_before_one_comes_again() -> None:
    plan, whole = Plan(7, list(KINDS)), {"a": 2, "b": 2, "c": 2}
    first = [plan.next(whole) for _ in KINDS]
    second = [plan.next(whole) for _ in KINDS]
    assert all(Counter(fault.kind for fault in part if fault) == Counter(list(KINDS)) for part in (first, second))
    again = Plan(7, list(KINDS))
    assert [again.next(whole) for _ in KINDS] == first
    assert all(fault and whole[list(whole)[fault.node]] > fault.rank for fault in first)


@pytest.mark.parametrize(("kind", "whole", "possible"), [
    ("kill-rank", {"a": 1}, False),
    ("kill-rank", {"a": 2}, True),
    ("kill-keeper", {"a": 4}, False),
    ("kill-keeper", {"a": 1, "b": 1}, True),
    ("cut-link", {"a": 4}, False),
    ("kill-coordinator", {"a": 1}, True),
])  # fmt: skip
def test_the_last_rank_and_the_last_node_stay(kind: str, whole: dict[str, int], possible: bool) -> None:
    assert (Plan(0, [kind]).next(whole) is not None) is possible


def test_what_can_be_chosen() -> None:
    assert choose("", root=True) == (list(KINDS), {})
    chosen, left_out = choose("full-disk, kill-rank", root=False)
    assert (chosen, left_out) == (["kill-rank"], {"full-disk": "it needs root"})
    with pytest.raises(ConfigError, match="There is no fault 'fire': choose from kill-rank, "):
        choose("fire", root=True)
    with pytest.raises(ConfigError, match="No fault is left to play: full-disk needs root"):
        choose("full-disk", root=False)


def test_diaries(tmp_path: Path) -> None:
    path, diaries = tmp_path / "diary-1", Diaries(tmp_path)
    path.write_text("step 1000000000 4\nstep 1100000000 4\nstep 12000")
    assert diaries.read()[1].steps == [1.0, 1.1]
    with path.open("a") as file:
        file.write("00000 4\nstep 2200000000 3\nepoch 0 ab 0 0 4\nend\nstep 23")
    found = diaries.read()[1]
    assert (found.steps, found.world, found.ended) == ([1.0, 1.1, 1.2, 2.2], 3, True)
    assert found.epochs == {0: Epoch("ab", 0, 0, 4)}
    assert usual_step([found], 1.25) == pytest.approx(0.1)
    assert longest_pause([found, Diary(steps=[1.0, 1.3, 1.6, 1.9])], 1.25, 3.0) == pytest.approx(1.0)
    assert longest_pause([found], 2.5, 3.0) == 0.0


def test_what_is_broken_is_named() -> None:
    first, second = Epoch("ab", 0, 0, 4), Epoch("cd", 0, 0, 0)
    good = {1: Diary(epochs={0: first, 1: second}), 2: Diary(epochs={0: first})}
    assert not any(violations(good).values())
    assert whole_epochs(good) == {(4, 0): "ab"}
    one, other = Diary(epochs={0: Epoch("ab", 3, 0, 4)}), Diary(epochs={0: Epoch("cd", 3, 1, 4)})
    bad = violations({1: one, 2: other})
    assert bad["lost"] == ["after epoch 0 3 samples are lost"]
    assert bad["doubled"] == ["after epoch 0 1 samples are doubled"]
    assert bad["different"] == ["after epoch 0 replicas differ (1: ab, 2: cd)"]


def test_faults_of_a_connection() -> None:
    """Of this very process: what is done to the copy happens to the connection."""
    me, before = os.getpid(), set(sockets.connections(os.getpid(), but=0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        port = far.getsockname()[1]
        assert set(sockets.connections(me, but=0)) - before == {near.fileno(), far.fileno()}
        assert set(sockets.connections(me, but=port)) == before
        if before:
            return  # connections of the test runner: they are left alone
        assert sockets.corrupt(me, 0, b"garbage") == 1
        near.settimeout(10.0)
        far.settimeout(10.0)
        assert sockets.pace(me, 0, 1000) == sockets.pace(me, 0, sockets.UNLIMITED) == 2
        assert sockets.cut(me, 0) == 2
        assert sorted([near.recv(100) + near.recv(100), far.recv(100) + far.recv(100)]) == [b"", b"garbage"]
        assert sockets.connections(me, but=0) == []
