"""Somebody between two hosts who reads and writes every byte: beyond loopback all that he can do is end the job.

The engines of ``beyond_loopback`` are in a network namespace of their own, on addresses that are no loopback ones.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from rig import engines
from rig.peer_relay import Relay

from bagua.csrc import load
from bagua.csrc.wire_version import WIRE_VERSION

HOSTS = [[0], [1]]
COUNT = 1000  # float32: one frame for each host and operation
HEADER = struct.Struct("<IHBBQIIQQQI8xI")  # csrc/core/transport/frame.h
MAGIC = b"BGUF"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
ADDRESS = "10.77.0.1"


class Forger(Relay):
    """Replaces the ones in each plain frame by thousands, and mends both checksums; counts what it could read."""

    forged = large = 0

    def change(self, data):
        piece = bytearray(data)
        at = piece.find(MAGIC)
        while at >= 0:
            self._forge(piece, at)
            at = piece.find(MAGIC, at + 4)
        self.large += len(piece) > COUNT
        return bytes(piece)

    def _forge(self, piece, at):
        """One frame, if it is whole in this piece (those of this test's size are) and carries data."""
        payload = at + HEADER.size
        if payload > len(piece):
            return
        fields = list(HEADER.unpack_from(piece, at))
        size = fields[6]
        if fields[2] != 1 or size == 0 or payload + size > len(piece):
            return
        ones, thousands = (struct.pack("<f", value) for value in (1.0, 1000.0))
        piece[payload : payload + size] = piece[payload : payload + size].replace(ones, thousands)
        fields[10] = load().crc32c(bytes(piece[payload : payload + size]))
        HEADER.pack_into(piece, at, *fields)
        fields[11] = load().crc32c(bytes(piece[at : payload - 4]))
        HEADER.pack_into(piece, at, *fields)
        self.forged += 1


@pytest.fixture
def beyond_loopback():
    """``beyond_loopback(function)`` calls it where addresses are no loopback ones, and its sockets and threads are."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the program ip (Debian: iproute2)")
    libc = ctypes.CDLL(None, use_errno=True)

    def enter():
        if libc.unshare(NEW_NETWORK) != 0:
            return f"network namespaces can't be made here: {os.strerror(ctypes.get_errno())}"
        for command in ("link set lo up", f"addr add {ADDRESS}/32 dev lo"):
            subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=20)
        return ""

    with ThreadPoolExecutor(1) as thread:  # what it starts is in its namespace, too
        if problem := thread.submit(enter).result():
            pytest.skip(problem)
        yield lambda function: thread.submit(function).result()


def attacked(world, relay, wanted):
    """All-reduces of ones by two hosts that are joined by the forger come to this."""
    world.connect_by(relay)
    world.start("ones", count=COUNT, times=20)
    for result in world.lines().values():
        assert result == {"values": [wanted], "error": ""}
    assert relay.large >= 10, "everything went through the relay"
    assert (relay.forged == 0) == (wanted == 2.0), "it can read plain frames alone"


@pytest.mark.root
@pytest.mark.parametrize("plain", [False, True])
def test_forged_frames_beyond_loopback(make_world, make_relay, beyond_loopback, plain):
    """1 + 1 was 1001 on both hosts of version 0.1, without an error. With --plain-data it still is."""
    options = {"encryption": "never"} if plain else {}
    world = beyond_loopback(lambda: make_world(HOSTS, listen=f"{ADDRESS}:0", **options))
    relay = beyond_loopback(lambda: make_relay(world.engines[1].address(), Forger, address=ADDRESS))
    attacked(world, relay, 1001.0 if plain else 2.0)
    for engine in world.engines:
        stats = engine.stats()
        assert stats["bytes_sent"] > 0 and stats["bytes_encrypted"] == (0 if plain else stats["bytes_sent"])


@pytest.mark.parametrize(("options", "wanted"), [({"encryption": "always"}, 2.0), ({}, 1001.0)])
def test_forged_frames_on_loopback(make_world, make_relay, options, wanted):
    """There data is plain if nobody wants it otherwise."""
    world = make_world(HOSTS, **options)
    attacked(world, make_relay(world.engines[1].address(), Forger), wanted)


@pytest.mark.parametrize("elastic", [False, True])
def test_hosts_of_two_releases(make_world, wait_for, monkeypatch, elastic):
    """They say so at once, with both numbers. For an elastic job the other host is lost."""
    usual = engines.open_engine

    def of_its_release(core, hosts, index, *rest, **options):
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
    told = []
    wait_for(lambda: told.extend(world.engines[0].events()) or any(event["kind"] == "suspended" for event in told))
    (event,) = (event for event in told if event["kind"] in ("suspended", "error"))
    assert (event["kind"], event["host"]) == ("suspended", 1) and words in event["text"]


def test_no_libcrypto(make_world):
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
