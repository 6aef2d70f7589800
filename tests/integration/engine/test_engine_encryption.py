"""Somebody between two hosts who reads and writes every byte: beyond loopback all that he can do is end the job.

The engines of ``beyond_loopback`` are in a network namespace of their own, on addresses that are no loopback ones.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_relay import Relay
from rig import engines

from bagua.csrc import load
from bagua.csrc.wire_version import WIRE_VERSION

HOSTS = [[0], [1]]
COUNT = 1000  # float32: one frame for each host and operation
HEADER = struct.Struct("<IHBBQIIQQQI8xI")  # csrc/core/transport/frame.h
MAGIC = b"BGUF"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
ADDRESS = "10.77.0.1"


class Forger(Relay):
    """Replaces the ones in each plain frame by thousands, and mends both checksums; counts what it could read.

    With ``flip`` it changes, in the tenth large piece, one bit of whatever passes.
    """

    def __init__(self, target: str, address: str = "127.0.0.1", flip: bool = False) -> None:
        self.core = load()
        self.flip = flip
        self.lock = threading.Lock()  # guards the next two
        self.forged = 0
        self.large = 0
        super().__init__(target, address)

    def change(self, data: bytes) -> bytes:
        piece = bytearray(data)
        at = piece.find(MAGIC)
        while at >= 0:
            self._forge(piece, at)
            at = piece.find(MAGIC, at + 4)
        if len(piece) > COUNT:
            with self.lock:
                self.large += 1
                if self.flip and self.large == 10:
                    piece[len(piece) // 2] ^= 1
        return bytes(piece)

    def _forge(self, piece: bytearray, at: int) -> None:
        """One frame, if it is whole in this piece (those of this test's size are) and carries data."""
        payload = at + HEADER.size
        if payload > len(piece):
            return
        fields = list(HEADER.unpack_from(piece, at))
        size = fields[6]
        if fields[2] != 1 or size == 0 or payload + size > len(piece):
            return
        piece[payload : payload + size] = piece[payload : payload + size].replace(
            struct.pack("<f", 1.0), struct.pack("<f", 1000.0)
        )
        fields[10] = self.core.crc32c(bytes(piece[payload : payload + size]))
        HEADER.pack_into(piece, at, *fields)
        fields[11] = self.core.crc32c(bytes(piece[at : payload - 4]))
        HEADER.pack_into(piece, at, *fields)
        with self.lock:
            self.forged += 1


def attacked(world: Any, relay: Forger, times: int = 20) -> dict[int, dict[str, Any]]:
    """Results of all-reduces of ones by two hosts that are joined by the relay."""
    world.engines[0].set_peers([world.engines[0].address(), relay.address])
    world.engines[1].set_peers([engine.address() for engine in world.engines])
    world.start("ones", count=COUNT, times=times)
    try:
        return world.lines()
    finally:
        relay.close()


@pytest.fixture
def beyond_loopback() -> Iterator[Callable[..., Any]]:
    """``beyond_loopback(function)`` calls it where addresses are no loopback ones, and its sockets and threads are."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the program ip (Debian: iproute2)")
    libc = ctypes.CDLL(None, use_errno=True)

    def enter() -> str:
        if libc.unshare(NEW_NETWORK) != 0:
            return f"network namespaces can't be made here: {os.strerror(ctypes.get_errno())}"
        for command in ("link set lo up", f"addr add {ADDRESS}/32 dev lo"):
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)
        return ""

    with ThreadPoolExecutor(1) as thread:  # what it starts is in its namespace, too
        if problem := thread.submit(enter).result():
            pytest.skip(problem)
        yield lambda function: thread.submit(function).result()


@pytest.mark.root
def test_forged_frames_beyond_loopback(make_world: Callable[..., Any], beyond_loopback: Callable[..., Any]) -> None:
    """1 + 1 was 1001 on both hosts of version 0.1, without an error."""
    world = beyond_loopback(lambda: make_world(HOSTS, listen=f"{ADDRESS}:0"))
    relay = beyond_loopback(lambda: Forger(world.engines[1].address(), ADDRESS))
    for result in attacked(world, relay).values():
        assert result == {"values": [2.0], "error": ""}
    assert relay.large >= 10, "everything went through the relay"
    assert relay.forged == 0, "and there was nothing that it could read"
    for engine in world.engines:
        stats = engine.stats()
        assert stats["bytes_encrypted"] == stats["bytes_sent"] > 0


@pytest.mark.root
def test_one_bit_beyond_loopback(make_world: Callable[..., Any], beyond_loopback: Callable[..., Any]) -> None:
    world = beyond_loopback(lambda: make_world(HOSTS, listen=f"{ADDRESS}:0"))
    relay = beyond_loopback(lambda: Forger(world.engines[1].address(), ADDRESS, flip=True))
    results = attacked(world, relay)
    assert all(result["values"] in ([], [2.0]) and result["error"] for result in results.values())
    assert any("what came is not what it sent" in result["error"] for result in results.values())
    assert any(
        "host 0 (rank 0)" in result["error"] or "host 1 (rank 1)" in result["error"] for result in results.values()
    )
    assert sum(engine.stats()["frames_refused"] for engine in world.engines) >= 1


@pytest.mark.root
def test_plain_beyond_loopback_by_choice(make_world: Callable[..., Any], beyond_loopback: Callable[..., Any]) -> None:
    """With --plain-data the same relay gets through: it forges what the tests above say that it can't."""
    world = beyond_loopback(lambda: make_world(HOSTS, listen=f"{ADDRESS}:0", encryption="never"))
    relay = beyond_loopback(lambda: Forger(world.engines[1].address(), ADDRESS))
    for result in attacked(world, relay).values():
        assert result == {"values": [1001.0], "error": ""}
    assert relay.forged >= 2


@pytest.mark.parametrize("encryption", ["always", "never"])
def test_loopback_by_setting(make_world: Callable[..., Any], encryption: str) -> None:
    world = make_world(HOSTS, encryption=encryption)
    relay = Forger(world.engines[1].address())
    want = 2.0 if encryption == "always" else 1001.0
    for result in attacked(world, relay).values():
        assert result == {"values": [want], "error": ""}


def test_loopback_is_plain(make_world: Callable[..., Any]) -> None:
    world = make_world(HOSTS)
    for result in world.run("ones", count=COUNT, times=2).values():
        assert result == {"values": [2.0], "error": ""}
    for engine in world.engines:
        assert engine.stats()["bytes_encrypted"] == 0 < engine.stats()["bytes_sent"]


@pytest.mark.parametrize("plain", [0, pytest.param(1, marks=pytest.mark.full)])
def test_hosts_that_disagree(make_world: Callable[..., Any], plain: int) -> None:
    settings = ["always", "always"]
    settings[plain] = "never"
    world = make_world(HOSTS, encryption=settings)
    error = world.run("ones", count=COUNT, times=1)[0]["error"]
    whose = "this host's" if plain == 0 else "the other host's"
    assert f"{whose} daemon was started with --plain-data" in error
    assert "no connection to host 1 (rank 1)" in error
    assert world.engines[1].stats()["bad_connections"] >= 1  # several are dialled at once


@pytest.mark.parametrize("elastic", [False, True])
def test_hosts_of_two_releases(
    make_world: Callable[..., Any], wait_for: Callable[..., None], monkeypatch: pytest.MonkeyPatch, elastic: bool
) -> None:
    """They say so at once, with both numbers. For an elastic job the other host is lost."""
    usual = engines.open_engine

    def of_its_release(core: Any, hosts: Any, index: int, *rest: Any, **options: Any) -> Any:
        core.set_wire_version(WIRE_VERSION + index)
        try:
            return usual(core, hosts, index, *rest, **options)
        finally:
            core.set_wire_version(WIRE_VERSION)

    monkeypatch.setattr(engines, "open_engine", of_its_release)
    world = make_world(HOSTS, elastic=elastic)
    words = f"the other host speaks wire version {WIRE_VERSION + 1}, this one wire version {WIRE_VERSION}: install one"
    if not elastic:
        assert words in world.run("ones", count=COUNT, times=1)[0]["error"]
        return
    world.connect()
    world.start("ones", count=COUNT, times=1)
    told: list[dict[str, Any]] = []
    wait_for(lambda: told.extend(world.engines[0].events()) or any(event["kind"] == "suspended" for event in told))
    (event,) = (event for event in told if event["kind"] in ("suspended", "error"))
    assert (event["kind"], event["host"]) == ("suspended", 1) and words in event["text"]


def test_no_libcrypto(make_world: Callable[..., Any]) -> None:
    """The library is looked for once in a process: the answer of one where there is none."""
    script = (
        "from bagua.csrc import build\nimport sys\n"
        "core = build._load(build.Path(sys.argv[1]))\n"
        "options = dict(job_id='j', generation=1, host_index=0, hosts=[[0], [1]], data_socket=sys.argv[2],\n"
        "               tokens={0: bytes(32)}, job_key=bytes(32), listen='127.0.0.1:0')\n"
        "core.Engine(**options).close()\n"
        "core.Engine(**options, encryption='always')\n"
    )
    world = make_world(HOSTS)
    ended = subprocess.run(
        [sys.executable, "-c", script, load().__file__, world.sockets[0] + ".other"],
        env={**os.environ, "BAGUA_LIBCRYPTO": ""}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    for words in ("libcrypto (1.1.1 or 3)", "libssl3", "BAGUA_LIBCRYPTO", "--plain-data"):
        assert words in ended.stderr, ended.stderr
