"""`bagua chaos`: the order of faults, and what it judges."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bagua.base.address import join_address, split_address
from bagua.base.errors import ConfigError, ServiceError
from bagua.base.trees import remove_tree
from bagua.chaos import patience, sockets
from bagua.chaos.diary import Breach, Diaries, Diary, Epoch, longest_pause, usual_step, violations, whole_epochs
from bagua.chaos.firewall import Firewall, reason_against
from bagua.chaos.plan import FENCE_AFTER_S, JOIN, KINDS, Fault, Need, Plan, choose
from bagua.chaos.relay import Relay
from bagua.chaos.report import HEADINGS, PROMISES, Played, by_group, by_kind, markdown
from bagua.chaos.training import Trap
from bagua.cli.faults.campaign import Chaos, Findings, Wanted
from bagua.cli.faults.cluster import next_release
from bagua.cli.faults.inject import Trained, resist

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
    assert choose("", {"root", "firewall", "sqlite", "postgresql"}) == (list(KINDS), {})
    chosen, left_out = choose("full-disk, kill-rank", ())
    assert (chosen, left_out) == (["kill-rank"], {"full-disk": "it needs root"})
    with pytest.raises(ConfigError, match="There is no fault 'fire': choose from kill-rank, "):
        choose("fire", ())
    with pytest.raises(ConfigError, match=r"No fault is left to play \(kill-leader: it needs --postgresql\)"):
        choose("kill-leader", {"root", "sqlite"})
    databases: list[tuple[Need, Need]] = [("sqlite", "postgresql"), ("postgresql", "sqlite")]
    for database, other in databases:
        chosen, _ = choose("", {database})
        assert {KINDS[name].needs for name in chosen} == {None, database} and other not in chosen
    assert choose("pause, cut-host", {"root"})[1]["cut-host"].startswith("it needs root, and a kernel that runs BPF")


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
        ["planned changes: scale, drain, upgrade, other-release, pause", "1", "0", "0", "", ""],
        [
            *("network, disk: cut-link, slow-link, delay-link, corrupt-link, full-disk, read-only", "1", "0", "0"),
            *("500", "500"),
        ],
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


CONNECT = """
import errno, socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    with socket.socket() as one:
        one.settimeout(0.3)
        found = one.connect_ex((host, int(port)))
        print(errno.errorcode.get(found, "no answer" if found else one.getsockname()[0]))
"""


def test_a_firewall() -> None:
    """The coordinator's port can be reached whatever is lost or refused, and connections come from the address."""
    if reason := reason_against():
        pytest.skip(f"no firewall here: {reason}")
    with contextlib.ExitStack() as stack:
        coordinator, near, far = (
            stack.enter_context(socket.create_server((host, 0))).getsockname()
            for host in ("127.0.0.1", "127.0.0.3", "127.0.0.4")
        )
        firewall = Firewall("test", "127.0.0.7", coordinator[1])
        stack.callback(firewall.close)

        def connect(*addresses: tuple[str, int]) -> list[str]:
            words = [str(word) for address in addresses for word in address]
            command = [*firewall.prefix, sys.executable, "-S", "-c", CONNECT, *words]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

        mine = "127.0.0.7"
        for name in ("EACCES", "EPERM", "ENETDOWN", "EADDRNOTAVAIL"):
            with firewall.refused(getattr(errno, name)):
                assert connect(coordinator, near) == [mine, name]
        for sides in (("in",), ("out",)):
            with firewall.dropped(sides):  # type: ignore[arg-type]
                assert connect(coordinator, near)[0] == mine and connect(near)[0] in ("EAGAIN", "EINPROGRESS")
            with firewall.dropped(sides, near[0]):  # type: ignore[arg-type]
                assert connect(far)[0] == mine and connect(near)[0] in ("EAGAIN", "EINPROGRESS")
        assert connect(near, far) == [mine, mine]


@pytest.mark.parametrize(("starved_s", "ends_after_s"), [(0.0, 60), (0.5, 120), (1.0, 600)])
def test_time_in_which_nobody_had_a_processor_does_not_count(
    monkeypatch: pytest.MonkeyPatch, starved_s: float, ends_after_s: float
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(patience.Starved, "more", lambda self: starved_s * 1.05)  # of a look each 1.05 s
    with pytest.raises(ServiceError, match=r"Not within 60 s.*: it comes"):
        patience.until(lambda: False, "it comes")
    assert now[0] == pytest.approx(ends_after_s, rel=0.05)


def test_processes_below_this_one_are_found() -> None:
    with subprocess.Popen(["sh", "-c", "exec 3<&0; cat <&3 & wait"], stdin=subprocess.PIPE) as shell:
        patience.until(lambda: len(patience.descendants(shell.pid)) == 1, "a child")
        found = [shell.pid, *patience.descendants(shell.pid)]
        assert set(found) <= set(patience.descendants(os.getpid())) and set(patience.waited(found)) == set(found)
        os.kill(found[1], 15)
    assert not any(map(patience.alive, found)) and patience.waited(found) == {}


@pytest.mark.parametrize(("lasted_s", "expected"), [(1.0, False), (FENCE_AFTER_S + 1, True)])
def test_who_is_lost_by_a_fault_that_a_slow_machine_made_long_is_no_alarm(
    tmp_path: Path, lasted_s: float, expected: bool
) -> None:
    """A coordinator that needs long to start is away for longer than nodes wait for it."""
    cluster: Any = SimpleNamespace(connected=lambda names: True, nodes={"a": None})
    chaos = Chaos(Wanted(60.0, 1, 0, ("kill-coordinator",), 1, 2, 0, False), cluster, tmp_path, lambda line: None)
    trained = Trained("job", tmp_path, 1, {"a": [os.getpid(), 0]})  # there is no process 0
    (tmp_path / f"diary-{os.getpid()}").write_text("".join(f"step {int(1e18) + n} 2\n" for n in range(10)))

    class Injector:
        def play(self, *_: object) -> tuple[str, float, float]:
            return "", time.monotonic() - lasted_s, time.monotonic()

        def repair(self, *_: object) -> None: ...

    def look(trained: Trained) -> None:
        trained.ranks = {"a": [os.getpid()]}

    chaos._injector, chaos._look = Injector(), look  # type: ignore[assignment, method-assign]
    chaos._wait_until_whole = lambda trained: None  # type: ignore[method-assign]
    fault = Fault("kill-coordinator", 0, 0, True, 0.0)
    with contextlib.nullcontext() if expected else pytest.raises(ServiceError, match="ranks ended that should go on"):
        chaos._play(fault, trained)


def test_the_next_release_differs_in_its_wire_version_alone(tmp_path: Path) -> None:
    program = "import bagua; from bagua.csrc.wire_version import WIRE_VERSION; print(bagua.__version__, WIRE_VERSION)"
    said = [
        subprocess.run(
            [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        for environment in (dict(os.environ), {**os.environ, "PYTHONPATH": str(next_release(tmp_path / "next"))})
    ]
    (release, number), (other_release, other_number) = (done.stdout.split() for done in said)
    assert (other_release, int(other_number)) == (release, int(number) + 1)


def test_a_tree_that_resists(tmp_path: Path) -> None:
    for _ in range(2):
        resist(tmp_path / "tree")
    assert oct((tmp_path / "tree" / "closed").stat().st_mode) == "0o40000"
    remove_tree(tmp_path / "tree")
    assert not any(tmp_path.iterdir())
