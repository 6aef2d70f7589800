"""Ranks, their calls and their memory: what happens when something goes wrong."""

import os
import resource
import secrets
import signal
import socket
import threading
import time

import pytest

from bagua.csrc import load
from bagua.csrc.wire_version import WIRE_VERSION

MIB = 1 << 20
ONE_HOST, TWO_HOSTS = [[0, 1]], [[0], [1]]
BARRIER = ["barrier", "float32", {}]
CALL = ["allreduce", "float32", {"count": 100, "shape": [10, 10], "label": "bucket 3"}]
CODED = ["allreduce", "float32", {"count": 100, "codec": 5, "residual": 1}]
MISMATCHES = {
    "count": (
        ONE_HOST, CALL, ["allreduce", "float32", {"count": 128, "shape": [128]}],
        "all-reduce #1 of world (bucket 3): rank 1 passed 128 x float32 [128], SUM, rank 0 passed 100 x float32 "
        "[10, 10], SUM.",
    ),
    "op": (ONE_HOST, CALL, ["allreduce", "float32", {"count": 100, "op": "MAX"}], "rank 1 passed 100 x float32, MAX"),
    "large count": (TWO_HOSTS, CALL, ["allreduce", "float32", {"count": 90_000}], "(host 1) passed 90000 x float32"),
    "empty": (TWO_HOSTS, CALL, ["allreduce", "float32", {"count": 0}], "(host 1) passed 0 x float32"),
    "dtype": (TWO_HOSTS, CALL, ["allreduce", "float64", {"count": 100}], "(host 1) passed 100 x float64"),
    "kind": (
        TWO_HOSTS, CALL, ["broadcast", "float32", {"count": 100, "root": 0}],
        "(host 1) called broadcast with 100 x float32",
    ),
    "root": (
        TWO_HOSTS, ["reduce", "float32", {"count": 8, "root": 0}], ["reduce", "float32", {"count": 8, "root": 1}],
        "(host 1) passed 8 x float32, SUM, root 1, rank 0 (host 0) passed 8 x float32, SUM, root 0",
    ),
    "message": (
        TWO_HOSTS, ["recv", "float32", {"count": 8, "root": 1}], ["send", "float32", {"count": 9, "root": 0}],
        "rank 1 sends 9 x float32, root 0, rank 0 expects 8 x float32, root 1",
    ),
    "codec": (
        TWO_HOSTS, CODED, ["allreduce", "float32", {"count": 100}],
        "SUM, rank 0 (host 0) passed 100 x float32, SUM, codec minmax8 with error feedback",
    ),
    "density": (
        TWO_HOSTS, CODED, ["allreduce", "float32", {"count": 100, "codec": 8, "density": 9, "residual": 1}],
        "codec topk of density 9/65536",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_names_both_sides(make_world, what):
    hosts, one, other, text = MISMATCHES[what]
    world = make_world(hosts)
    results = world.run("call", calls=[[BARRIER, one], [BARRIER, other]])
    assert results[0]["error"] == results[1]["error"], "the first error is told everywhere"
    assert text in results[0]["error"]
    told = [event["text"] for event in world.engines[0].events() if event["kind"] == "error"]
    assert told == [world.engines[0].error()] and text in told[0]


BAD_CALLS = {
    "too long": ("allreduce", "float32", {"count": 1 << 30}, "src of 4294967296 bytes at offset 0 of a segment of"),
    "overflow": ("allgather", "float64", {"count": 1 << 63}, "a count of 9223372036854775808"),
    "offset": ("allreduce", "float32", {"src": 1 << 62}, "at offset 4611686018427387904"),
    "alignment": ("allreduce", "float32", {"src": 2}, "not a multiple of the element size"),
    "root": ("broadcast", "float32", {"root": 7}, "root 7; it must be 0"),
    "segment": ("allreduce", "float32", {"at": 99}, "segment 99 as dst, which it does not hold"),
    "reduction": ("allreduce", "float32", {"op": "BXOR"}, "is not supported"),
    "overlap": ("alltoall", "float32", {"at": 1}, "overlap"),
    "itself": ("send", "float32", {"root": 0}, "itself as the other end"),
    "communicator": ("allreduce", "float32", {"comm": 5}, "communicator 5, of which it is no member"),
    "codec of a kind": ("broadcast", "float32", {"root": 0, "codec": 1}, "only all-reduce takes a codec"),
    "codec of a dtype": ("allreduce", "float64", {"codec": 5}, "codec minmax8 for float64; codecs take float32"),
    "codec of a reduction": ("allreduce", "float32", {"codec": 5, "op": "MAX"}, "for MAX; codecs take SUM and AVG"),
    "codec": ("allreduce", "float32", {"codec": 77}, "codec 77, which is unknown"),
    "density": ("allreduce", "float32", {"codec": 8}, "codec topk with density 0"),
    "exact": ("allreduce", "float32", {"codec": 5, "exact": 9}, "9 exact elements of a vector of 4"),
    "residual": ("allreduce", "float32", {"residual": 3}, "residual 3 without a codec"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_call_fails_in_words(members, what):
    kind, dtype, more, text = BAD_CALLS[what]
    core = load()
    _, (rank,) = members(1)
    given = {"comm": 0, "count": 4, "src": 0, "at": 2, "op": "SUM", **more}
    src, dst = rank.alloc(MIB), rank.alloc(MIB)
    assert (src.id, dst.id) == (1, 2)
    with pytest.raises(core.CoreError) as refusal:
        ticket = rank.submit(
            kind=core.KINDS[kind], dtype=core.DTYPES[dtype], op=core.OPS[given.pop("op")],
            src=(src.id, given.pop("src")), dst=(given.pop("at"), 0), **given,
        )  # fmt: skip
        rank.wait(ticket, 60.0)
    assert text in str(refusal.value)


def test_child_that_holds_the_socket_hides_nothing(make_world, wait_for):
    world = make_world([[0]])
    world.start("forked")
    assert "forked child" in world.line(0)["child"]
    assert world.engines[0].error() == ""
    world.kill(0)
    wait_for(lambda: "rank 0 (pid" in world.engines[0].error(), 1.0)


@pytest.mark.parametrize("hosts", [[[0, 1, 2]], TWO_HOSTS], ids=str)
def test_waiting_names_who_is_missing(make_world, wait_for, hosts):
    world = make_world(hosts)
    world.connect()
    world.start("hang", skip=1)
    world.lines()
    words = "ranks 0, 2 have been waiting for rank 1" if len(hosts) == 1 else "host 1 (rank 1) has not begun it"
    wait_for(lambda: words in world.engines[0].waiting(0.01))
    assert "all-reduce #0 of world (bucket 3)" in world.engines[0].waiting(0.01)
    assert world.engines[0].waiting(100.0) == ""
    world.go_on(1)
    assert world.lines() == {rank: {} for rank in world.tokens}
    assert world.engines[0].waiting(0.0) == ""


@pytest.mark.parametrize("send", [False, True])
def test_rank_that_left_is_named(make_world, send):
    world = make_world([[0, 2], [1]])
    world.connect()
    world.start("leave", who=1, send=send)
    assert world.line(1) == {}
    error = world.line(0, 5.0)["error"]
    assert "rank 1 has left the job in good order, but" in error and "needs it" in error
    assert ("left", 1) in {(event["kind"], event["rank"]) for event in world.engines[1].events()}


def test_interrupt_ends_a_wait(make_world):
    world = make_world(ONE_HOST)
    world.start("interrupted", only=[0])
    world.line(0)
    time.sleep(0.05)  # it says ready just before it waits
    world.ranks[0].signal(signal.SIGINT)
    assert world.line(0) == {"interrupted": True}  # nobody else would end its wait


def test_second_hello_and_wrong_token_are_refused(members):
    world, _ = members(2)
    for token, words in ((world.tokens[1], "rank 1 has joined already"), (bytes(32), "wrong token")):
        with pytest.raises(load().CoreError, match=words):
            load().Rank(data_socket=world.sockets[0], token=token, rank=1)
    assert world.engines[0].stats()["bad_connections"] == 2


def hello(world, version):
    """A stranger who says it is rank 0, with its token."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(world.sockets[0])
    words = b"".join(word.to_bytes(4, "little") for word in (1, version, 0))
    stranger.send(b"BUGA" + words + bytes(16) + world.tokens[0])
    return stranger


def test_a_joined_rank_that_says_nonsense_is_lost(make_world, wait_for):
    world = make_world(ONE_HOST)
    with hello(world, WIRE_VERSION) as stranger:
        assert stranger.recv(4096)
        stranger.send(b"BUGA" + secrets.token_bytes(200))
        wait_for(lambda: "rank 0 (pid" in world.engines[0].error())


def test_a_process_of_another_release_is_told(make_world):
    world = make_world(ONE_HOST)
    with hello(world, WIRE_VERSION + 1) as stranger:
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
def test_bad_settings(tmp_path, change, text):
    settings = {
        "job_id": "j", "generation": 1, "host_index": 0, "hosts": [[0]], "data_socket": str(tmp_path / "s"),
        "tokens": {0: bytes(32)}, "job_key": bytes(32), "listen": "127.0.0.1:0",
    }  # fmt: skip
    with pytest.raises(load().CoreError, match=text):
        load().Engine(**{**settings, **change})


def test_close_gives_everything_back(make_world, wait_for):
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    make_world([[0]]).stop()
    before = held()
    for _ in range(25):
        world = make_world(TWO_HOSTS)
        world.connect()
        closers = [threading.Thread(target=engine.close) for engine in world.engines]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        world.engines[0].close()
        # A thread that was joined is listed for a moment, and one of another test too.
        wait_for(lambda: held()[1] <= before[1])
        world.engines.clear()
    wait_for(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


# ---- memory


def test_an_allocation_that_does_not_fit_is_refused(members):
    _, (first, second) = members(2, memory_limit=8 * MIB)
    held = first.alloc(6 * MIB)
    with pytest.raises(load().CoreError, match="rank 1 asks for 3 MiB of shared memory, but only 2 MiB are left"):
        second.alloc(3 * MIB)
    with pytest.raises(load().CoreError, match="bounded by"):
        first.require(1 << 50)
    first.free(held.id)
    assert second.alloc(3 * MIB).nbytes == 3 * MIB  # what was given back can be had


def test_the_limit_of_address_space_counts(members):
    _, (rank,) = members(1)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * MIB, hard))
    try:
        with pytest.raises(load().CoreError, match="limit of address space, ulimit -v"):
            rank.alloc(1024 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def shared_mappings():
    """Mappings of shared memory in this process, where daemon and ranks are one."""
    with open("/proc/self/maps") as maps:
        return sum("/memfd:bagua" in line for line in maps)


def test_memory_comes_back(members, wait_for):
    """Views outlive it."""
    _, (rank,) = members(1)
    joined = shared_mappings()
    segments = [rank.alloc(MIB) for _ in range(20)]
    assert rank.counters()["segment_bytes"] == 20 * MIB
    assert shared_mappings() >= joined + 20
    view = memoryview(segments[0])
    for segment in segments[:19]:
        rank.free(segment.id)
    assert rank.counters()["segment_bytes"] == MIB
    del segment
    segments.clear()
    view[4999] = 7
    assert view[4999] == 7
    del view
    wait_for(lambda: shared_mappings() <= joined + 1)  # the daemon's mapping of the last one
    rank.close()
    wait_for(lambda: shared_mappings() <= joined)
