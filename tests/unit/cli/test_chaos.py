"""`bagua chaos`: the order of faults, and what it judges."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from bagua.base.address import join_address, split_address
from bagua.base.errors import ConfigError
from bagua.chaos import sockets
from bagua.chaos.diary import Breach, Diaries, Diary, Epoch, longest_pause, usual_step, violations, whole_epochs
from bagua.chaos.plan import JOIN, KINDS, Plan, choose
from bagua.chaos.relay import Relay
from bagua.chaos.report import HEADINGS, PROMISES, Played, by_group, by_kind, markdown
from bagua.chaos.training import Trap
from bagua.cli.faults.campaign import Findings

SIOCOUTQNSD = 0x894B  # bytes of a connection that were not sent yet


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
    assert choose("", {"root", "sqlite", "postgresql"}) == (list(KINDS), {})
    chosen, left_out = choose("full-disk, kill-rank", ())
    assert (chosen, left_out) == (["kill-rank"], {"full-disk": "it needs root"})
    with pytest.raises(ConfigError, match="There is no fault 'fire': choose from kill-rank, "):
        choose("fire", ())
    with pytest.raises(ConfigError, match=r"No fault is left to play \(kill-leader: it needs --postgresql\)"):
        choose("kill-leader", {"root", "sqlite"})
    for database, other in (("sqlite", "postgresql"), ("postgresql", "sqlite")):
        chosen, _ = choose("", {database})
        assert {KINDS[name].needs for name in chosen} == {None, database} and other not in chosen


def test_diaries(tmp_path: Path) -> None:
    path, diaries = tmp_path / "diary-1", Diaries(tmp_path)
    path.write_text("step 1000000000 4\nstep 1100000000 4\nstep 12000")
    assert diaries.read()[1].steps == [1.0, 1.1]
    with path.open("a") as file:
        file.write("00000 4\nstep 2200000000 3\nepoch 0 ab 0 0 4 2250000000\nend\nstep 23")
    found = diaries.read()[1]
    assert (found.steps, found.world, found.ended) == ([1.0, 1.1, 1.2, 2.2], 3, True)
    assert found.epochs == {0: Epoch("ab", 0, 0, 4, 2.25)}
    assert usual_step([found], 1.25) == pytest.approx(0.1)
    assert longest_pause([found, Diary(steps=[1.0, 1.3, 1.6, 1.9])], 1.25, 3.0) == pytest.approx(1.0)
    assert longest_pause([found], 2.5, 3.0) == 0.0


def test_what_is_broken_is_named() -> None:
    first, second = Epoch("ab", 0, 0, 4, 1.0), Epoch("cd", 0, 0, 0, 2.0)
    good = {1: Diary(epochs={0: first, 1: second}), 2: Diary(epochs={0: first})}
    assert violations(good) == []
    assert whole_epochs(good) == {(4, 0): "ab"}
    one = {0: Epoch("ab", 3, 0, 4, 1.0), 1: Epoch("ef", 5, 1, 0, 2.0)}
    other = {0: Epoch("cd", 3, 1, 4, 1.5), 1: Epoch("ef", 5, 1, 0, 2.5)}
    assert violations({1: Diary(epochs=one), 2: Diary(epochs=other)}) == [
        Breach("different", 1, 1.5, "after epoch 0 replicas differ (1: ab, 2: cd)"),
        Breach("lost", 3, 1.5, "after epoch 0 3 samples are lost"),
        Breach("doubled", 1, 1.5, "after epoch 0 1 samples are doubled"),
        Breach("lost", 2, 2.5, "after epoch 1 5 samples are lost"),  # the others were so before
    ]


def test_the_fault_before_it_is_to_blame() -> None:
    found = Findings(played=[Played("kill-rank", "", 1.0, 0.25), Played("cut-link", "", 2.0, 0.5)])
    found.breach("lost", "3 samples", at_s=1.9, count=3)
    found.breach("stuck", "it hangs")
    found.played += [Played("kill-rank", "", 3.0, 0.75), Played("pause", "", 4.0)]
    rows = {row.kind: row.cells() for row in by_kind(found.played)}
    assert list(rows) == ["kill-rank", "pause", "cut-link"], "in the order of --list"
    assert rows["kill-rank"] == ["kill-rank", "SIGKILL of a rank", "2", "3", "0", "0", "0", "500", "750"]
    assert rows["cut-link"][2:] == ["1", "0", "0", "0", "1", "500", "500"]
    assert rows["pause"][2:] == ["1", "0", "0", "0", "0", "", ""], "nobody went on"
    assert set(found.document()["kinds"][0]["broken"]) == set(PROMISES)  # type: ignore[index]
    lines = markdown(HEADINGS, [row.cells() for row in by_kind(found.played)]).splitlines()
    assert len(lines) == 5 and {line.count("|") for line in lines} == {len(HEADINGS) + 1}
    assert by_group([*found.played, Played(JOIN, "", 5.0, 0.1)]) == [
        ["ranks: kill-rank, stop-rank", "2", "3", "0", "500", "750"],
        ["planned changes: scale, drain, pause", "1", "0", "0", "", ""],
        ["network, disk: cut-link, slow-link, delay-link, corrupt-link, full-disk", "1", "0", "0", "500", "500"],
    ]


def test_an_address_that_moves() -> None:
    """A connection ends when it leaves the coordinator that it was to."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        relay = Relay()
        stack.callback(relay.close)
        for listener in listeners:
            relay.move(join_address(*listener.getsockname()))
            near = stack.enter_context(socket.create_connection(split_address(relay.address), 10.0))
            far = stack.enter_context(listener.accept()[0])
            far.settimeout(10.0)
            near.sendall(b"to it")
            assert far.recv(100) == b"to it"
            far.sendall(b"and back")
            assert near.recv(100) == b"and back"
            relay.move("127.0.0.1:1")
            assert (near.recv(100), far.recv(100)) == (b"", b"")


def test_a_trap_springs_once(tmp_path: Path) -> None:
    (tmp_path / "trap-takes").write_text("0")  # a signal that does nothing
    trap = Trap(tmp_path)
    trap.spring("prepares")
    assert not (tmp_path / "sprung").exists()
    trap.load_state_dict(trap.state_dict())
    assert (tmp_path / "sprung").read_text().startswith(f"{os.getpid()} ")
    (tmp_path / "sprung").unlink()
    trap.load_state_dict({})
    assert not any(tmp_path.iterdir())


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
        near.settimeout(10.0)
        far.settimeout(10.0)
        with sockets.copies(me, 0) as found, sockets.held(found):
            unsent = 0
            for _ in range(20):  # the kernel sends it after 0.2 s: this process may stand still for so long
                near.sendall(b"held")
                unsent = max(unsent, int.from_bytes(fcntl.ioctl(near, SIOCOUTQNSD, bytes(4)), "little"))
            assert unsent
        assert far.recv(80, socket.MSG_WAITALL) == b"held" * 20
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 0
        assert sockets.delay(me, 0, 0.0, 0.001) == 2
        assert sockets.corrupt(me, 0, b"garbage") == 1
        assert sockets.pace(me, 0, 1000) == sockets.pace(me, 0, sockets.UNLIMITED) == 2
        assert sockets.cut(me, 0) == 2
        assert sorted([near.recv(100) + near.recv(100), far.recv(100) + far.recv(100)]) == [b"", b"garbage"]
        assert sockets.connections(me, but=0) == []
