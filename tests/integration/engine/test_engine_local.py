"""The engine with all ranks on one host: results of every operation, and what happens when something goes wrong."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig.limits import SOON_S

from bagua.csrc import load
from bagua.csrc.wire_version import WIRE_VERSION

COUNTS = [0, 1, 1003, 70_001]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_operation(make_world: Callable[..., Any], ranks: int) -> None:
    world = make_world([list(range(ranks))])
    for result in world.run("verify", counts=COUNTS).values():
        assert result["wrong"] == []
        assert result["stats"]["ops"] > 50 and result["stats"]["bytes_sent"] == 0
    assert world.engines[0].error() == ""


def test_many_operations_in_flight(make_world: Callable[..., Any]) -> None:
    results = make_world([[0, 1]]).run("many", count=900)
    assert results == {0: {"timed_out": True}, 1: {"timed_out": True}}


CALL = ["allreduce", "float32", {"count": 100, "shape": [10, 10], "label": "bucket 3"}]
MISMATCHES = {
    "count": (
        ["allreduce", "float32", {"count": 128, "shape": [128]}],
        "all-reduce #1 of world (bucket 3): rank 1 passed 128 x float32 [128], SUM, rank 0 passed 100 x float32 "
        "[10, 10], SUM.",
    ),
    "dtype": (
        ["allreduce", "float64", {"count": 100}],
        "rank 1 passed 100 x float64, SUM, rank 0 passed 100 x float32",
    ),
    "op": (["allreduce", "float32", {"count": 100, "op": "MAX"}], "rank 1 passed 100 x float32, MAX"),
    "kind": (
        ["broadcast", "float32", {"count": 100, "root": 0}],
        "operation #1 of world: rank 1 called broadcast with 100 x float32, root 0, rank 0 called all-reduce (bucket",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_names_both_sides(make_world: Callable[..., Any], what: str) -> None:
    other, text = MISMATCHES[what]
    barrier = ["barrier", "float32", {}]
    world = make_world([[0, 1]])
    results = world.run("call", calls=[[barrier, CALL], [barrier, other]])
    assert all(text in result["error"] for result in results.values()), results
    assert text in world.engines[0].error()
    assert [event["text"] for event in world.engines[0].events() if event["kind"] == "error"] == [
        world.engines[0].error()
    ]


BAD_CALLS: dict[str, tuple[list[Any], str]] = {
    "too long": (["allreduce", "float32", {"count": 1 << 30}], "src of 4294967296 bytes at offset 0 of a segment of"),
    "overflow": (["allgather", "float64", {"count": 1 << 63}], "a count of 9223372036854775808"),
    "offset": (["allreduce", "float32", {"count": 4, "src": 1 << 62}], "at offset 4611686018427387904"),
    "alignment": (["allreduce", "float32", {"count": 4, "src": 2}], "not a multiple of the element size"),
    "root": (["broadcast", "float32", {"count": 4, "root": 7}], "root 7; it must be 0 to 1"),
    "segment": (["allreduce", "float32", {"count": 4, "at": [99, 0]}], "segment 99 as dst, which it does not hold"),
    "reduction": (["allreduce", "float32", {"count": 4, "op": "BXOR"}], "is not supported"),
    "overlap": (["alltoall", "float32", {"count": 4, "same": True}], "overlap"),
    "itself": (["send", "float32", {"count": 4, "root": 1}], "itself as the other end"),
    "communicator": (["allreduce", "float32", {"count": 4, "comm": 5}], "communicator 5, of which it is no member"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_call_fails_in_words(make_world: Callable[..., Any], what: str) -> None:
    bad, text = BAD_CALLS[what]
    world = make_world([[0, 1]])
    good = ["allreduce", "float32", {"count": 4}]
    results = world.run("call", calls=[[good, good], [good, bad]])
    assert all(text in result["error"] for result in results.values()), results


def test_killed_rank_frees_the_others(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    world = make_world([[0, 1, 2]])
    world.connect()
    world.start("endless", count=100_000)
    world.lines()
    world.kill(1)
    killed = time.monotonic()
    pid = world.ranks[1].pid
    for rank in (0, 2):
        result = world.line(rank)
        assert f"rank 1 (pid {pid}) went away without leaving" in result["error"]
        assert result["at"] - killed < SOON_S
    events = world.engines[0].events()
    assert {(event["kind"], event["rank"]) for event in events} >= {("joined", 0), ("lost", 1), ("error", -1)}
    wait_for(lambda: world.engines[0].stats()["segment_bytes"] == 0)


def test_child_that_holds_the_socket_hides_nothing(
    make_world: Callable[..., Any], wait_for: Callable[..., None]
) -> None:
    world = make_world([[0]])
    world.start("forked")
    assert "forked child" in world.line(0)["child"]
    assert world.engines[0].error() == ""
    world.kill(0)
    wait_for(lambda: "rank 0 (pid" in world.engines[0].error(), 1.0)


def test_waiting_names_who_is_missing(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    world = make_world([[0, 1, 2]])
    world.connect()
    world.start("hang", skip=1)
    world.lines()
    wait_for(lambda: "ranks 0, 2 have been waiting for rank 1" in world.engines[0].waiting(0.01))
    assert "all-reduce #0 of world (bucket 3)" in world.engines[0].waiting(0.01)
    assert world.engines[0].waiting(100.0) == ""
    world.go_on(1)
    assert world.lines() == {rank: {} for rank in range(3)}
    assert world.engines[0].waiting(0.0) == ""


def test_abort_frees_waiters(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1]])
    world.start("hang", skip=1)
    world.lines()
    world.engines[0].abort("rank 7 was killed by SIGKILL")
    world.engines[0].abort("a second reason")
    assert world.line(0, 2.0)["error"] == "rank 7 was killed by SIGKILL [BG502]"
    world.go_on(1)
    assert world.line(1, 2.0)["error"].startswith("rank 7 was killed by SIGKILL [BG")  # submitting fails fast


def test_closed_engine_frees_waiters(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1]])
    world.start("hang", skip=1)
    world.lines()
    world.engines[0].close()
    assert "closed the engine" in world.line(0, 2.0)["error"]


@pytest.mark.parametrize("send", [False, True])
def test_rank_that_left_is_named(make_world: Callable[..., Any], send: bool) -> None:
    world = make_world([[0, 1, 2]])
    world.connect()
    world.start("leave", who=1, send=send)
    assert world.line(1) == {}
    error = world.line(0, 5.0)["error"]
    assert "rank 1 has left the job in good order, but" in error and "needs it" in error
    assert ("left", 1) in {(event["kind"], event["rank"]) for event in world.engines[0].events()}


def test_interrupt_ends_a_wait(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1]])
    world.start("interrupted", only=[0])
    world.line(0)
    time.sleep(0.05)  # it says ready just before it waits
    world.ranks[0].signal(signal.SIGINT)
    assert world.line(0) == {"interrupted": True}  # nobody else would end its wait


def test_segments(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    world = make_world([[0]])
    result = world.run("segments")[0]
    assert result["freed"] == 8192
    assert "which it does not hold (was it freed?)" in result["error"]
    wait_for(lambda: world.engines[0].stats()["segment_bytes"] == 0)


def test_second_hello_and_wrong_token_are_refused(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1]])
    for rank, result in world.run("refused").items():
        assert f"rank {rank} has joined already" in result["errors"][0]
        assert "wrong token" in result["errors"][1]
    assert world.engines[0].stats()["bad_connections"] == 4


def talk(path: str, *messages: bytes) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(path)
    for message in messages:
        stranger.send(message)
    return stranger


def test_garbage_on_the_socket(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    world = make_world([[0, 1]])
    path, engine = world.sockets[0], world.engines[0]
    assert os.stat(path).st_mode & 0o777 == 0o600
    hello = b"BUGA" + (1).to_bytes(4, "little") + bytes(56)
    held = [
        talk(path, secrets.token_bytes(64)),
        talk(path, b"x"),
        talk(path, secrets.token_bytes(60_000)),
        talk(path, hello[:40]),
        talk(path, b"BUGA" + (2).to_bytes(4, "little") + bytes(56)),  # asks for memory without a hello
        talk(path, hello),  # version 0
        *[talk(path) for _ in range(150)],  # says nothing; the oldest make room
    ]
    wait_for(lambda: engine.stats()["bad_connections"] >= 6)
    results = world.run("call", calls=[[["barrier", "float32", {}]]] * 2)
    assert results == {0: {}, 1: {}}
    for stranger in held:
        stranger.close()
    assert engine.error() == ""


def test_fuzzed_requests_of_a_joined_rank(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    """A rank that joined and then says nonsense loses its connection; the engine says which rank it was."""
    world = make_world([[0, 1]])
    version = WIRE_VERSION
    hello = b"BUGA" + b"".join(word.to_bytes(4, "little") for word in (1, version, 0)) + bytes(16)
    with talk(world.sockets[0], hello + world.tokens[0]) as stranger:
        assert stranger.recv(4096)
        stranger.send(b"BUGA" + secrets.token_bytes(200))
        wait_for(lambda: "rank 0 (pid" in world.engines[0].error())


def test_a_process_of_another_release_is_told(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1]])
    hello = b"BUGA" + b"".join(word.to_bytes(4, "little") for word in (1, WIRE_VERSION + 1, 0)) + bytes(16)
    with talk(world.sockets[0], hello + world.tokens[0]) as stranger:
        told = f"daemon speaks wire version {WIRE_VERSION}, this one wire version {WIRE_VERSION + 1}: install"
        assert told.encode() in stranger.recv(4096)
    assert world.engines[0].error() == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hosts": []}, "hosts is empty"),
        ({"host_index": 3}, "host_index 3"),
        ({"hosts": [[0, 2]]}, "0 to n - 1"),
        ({"hosts": [[0, 0]]}, "rank 0 is there twice"),
        ({"tokens": {0: b"short"}}, "needs a token of 32 bytes"),
        ({"streams": 0}, "streams must be"),
        ({"chunk_bytes": 1 << 30}, "chunk_bytes must be"),
        ({"data_socket": "/" + "x" * 200}, "a Unix socket allows"),
        ({"data_socket": "/nonexistent/folder/s"}, "No such file or directory"),
    ],
)
def test_bad_settings(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    core = load()
    settings: dict[str, Any] = {
        "job_id": "j", "generation": 1, "host_index": 0, "hosts": [[0]], "data_socket": str(tmp_path / "s"),
        "tokens": {0: bytes(32)}, "job_key": bytes(32), "listen": "127.0.0.1:0",
    }  # fmt: skip
    with pytest.raises(core.CoreError, match=text):
        core.Engine(**{**settings, **change})


def test_nobody_listens(tmp_path: Path) -> None:
    core = load()
    with pytest.raises(core.CoreError, match="can't be reached"):
        core.Rank(data_socket=str(tmp_path / "none"), token=bytes(32), rank=0, timeout_s=1.0)


def test_events_wake_the_daemon(make_world: Callable[..., Any]) -> None:
    engine = make_world([[0]]).engines[0]
    assert not select.select([engine.event_fd()], [], [], 0)[0]
    engine.abort("why")
    assert select.select([engine.event_fd()], [], [], 1)[0]
    assert engine.events() == [{"kind": "error", "rank": -1, "text": "why"}]
    assert not select.select([engine.event_fd()], [], [], 0)[0]


@pytest.mark.parametrize("hosts", [1, 2])
def test_close_gives_everything_back(make_world: Callable[..., Any], wait_for: Callable[..., None], hosts: int) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    make_world([[0]]).stop()
    before = held()
    for _ in range(25):
        world = make_world([[host] for host in range(hosts)])
        world.connect()
        closers = [threading.Thread(target=engine.close) for engine in world.engines]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        world.engines[0].close()
        wait_for(
            lambda: held()[1] <= before[1]
        )  # a thread that was joined is listed for a moment, one of another test too
        world.engines.clear()
    wait_for(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
