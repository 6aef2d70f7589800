"""Whole hosts that stall or vanish under load: who is named, what it costs, what is left behind. Connections that are
slow, and rings whose order follows from measured bandwidths."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from rig.peer_relay import Relay

COUNT = 1 << 20  # float32: the whole segment of a worker
VERDICT = (4, 36)  # bytes of the first piece of it; see csrc/core/transport/handshake.cpp
SLICE_S = 2.0  # kDialSliceNs of csrc/core/engine/remote/dialler.cpp
STREAMS = 2
MEMORY = 256 << 20  # bytes that the process of an engine may have while its peer takes nothing


@pytest.fixture
def under_load(make_hosts):
    """``under_load(**options)``: two hosts with all-reduces without end, which run."""

    def make(**options):
        pair = make_hosts(2, **options)
        pair.start("endless", count=COUNT)
        for rank in pair.ranks.values():
            assert rank.answer() == {"ready": True}
        time.sleep(0.2)
        return pair

    return make


def check_end(pair, host, named):
    """Host ``host`` fails and says ``named``; its rank hears it; nothing is left. The error."""
    engine = pair.engines[host]
    text = engine.ask("error", job="job")["error"]
    assert named in text, text
    assert engine.ask("resources")["bytes"] < MEMORY, "its memory grew while its peer took nothing"
    assert text in pair.ranks[host].answer()["error"]
    engine.ask("close", job="job")
    left = engine.ask("resources")
    assert [left[name] - pair.before[host][name] for name in ("fds", "threads")] == [0, 0]
    return text


def test_a_stalled_host_is_named(under_load):
    pair = under_load(peer_timeout_s=3.0)
    pair.engines[1].signal(signal.SIGSTOP)
    pair.await_text(0, "host 1 (rank 1)")
    assert "all-reduce" in check_end(pair, 0, "host 1 (rank 1) has not answered for ")
    pair.engines[1].signal(signal.SIGCONT)
    # It hears what host 0 said meanwhile: the cause, not merely that host 0 has closed.
    check_end(pair, 1, "host 1 (rank 1) has not answered for ")


def test_hosts_that_stood_still_one_after_the_other_go_on(under_load):
    """As all machines of a cluster that are moved. The first to wake up has waited for the other one in vain."""
    pair = under_load(peer_timeout_s=3.0)
    pair.engines[1].signal(signal.SIGSTOP)
    pair.await_text(0, "has not answered for")
    pair.engines[0].signal(signal.SIGSTOP)
    time.sleep(4)
    for host in pair.engines:
        host.signal(signal.SIGCONT)
        time.sleep(0.1)
    for host in pair.engines:
        before = host.ask("state", job="job")["stats"]["ops"]
        deadline = time.monotonic() + 30
        while (state := host.ask("state", job="job"))["stats"]["ops"] <= before + 3:
            assert not state["error"] and time.monotonic() < deadline


class LateVerdicts(Relay):
    """Holds back the last words of the first handshakes: one for each stream, and the control lane's."""

    held = 0

    def change(self, data):
        if len(data) in VERDICT and self.held <= STREAMS:
            self.held += 1
            time.sleep(1.5 * SLICE_S)
        return data


def test_a_connection_that_was_accepted_is_awaited(make_world, make_relay):
    """The host that accepts it uses it at once: it would take one that is closed and dialled again for a lost host."""
    world = make_world([[0], [1]], streams=STREAMS)
    relay = make_relay(world.engines[1].address(), LateVerdicts)
    world.connect_by(relay)
    world.start("ones", count=1000, times=2)
    assert list(world.lines().values()) == [{"values": [2.0], "error": ""}] * 2
    assert relay.held


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a pair of devices named veth0."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the program 'ip'")
    names = [f"bagua-{os.getpid()}-{host}" for host in range(2)]

    def ip(*arguments, check=True):
        subprocess.run(["ip", *arguments], check=check, capture_output=True)

    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.1.{host + 1}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@pytest.mark.parametrize(
    ("timeout", "named"),
    [
        (2.0, "host 1 (rank 1) has not answered for "),
        pytest.param(600.0, "lost host 1 (rank 1): nothing has been acknowledged for ", marks=pytest.mark.full),
    ],
)
def test_a_cut_cable(under_load, namespaces, timeout, named):
    """Both ends of it go: nothing is delivered and nobody is told."""
    pair = under_load(namespaces=namespaces, peer_timeout_s=timeout)
    subprocess.run(["ip", "-n", namespaces[1], "link", "set", "veth0", "down"], check=True)
    check_end(pair, 0, named)
    check_end(pair, 1, "host 0 (rank 0)")


# ---- rings

FOUR = [[0], [1], [2], [3]]


@pytest.fixture
def ring(make_world, make_relay):
    """``ring(slow, rate)``: four hosts, of which a pair is joined by a relay, and that relay."""

    def make(slow, rate):
        world = make_world(FOUR, chunk_bytes=16384, streams=2)
        relay = make_relay(world.engines[slow[1]].address())
        relay.rate = rate
        return world, relay

    return make


def told(world):
    """The ring events of every host."""
    return [[event["text"] for event in engine.events() if event["kind"] == "ring"] for engine in world.engines]


def check_results(world):
    world.start("ones", count=70_001, times=2)
    assert list(world.lines().values()) == [{"values": [4.0], "error": ""}] * 4


def test_a_slow_pair_is_no_neighbours(ring, wait_for):
    world, relay = ring((1, 2), 1e6)
    world.connect_by(relay, 1, 2)
    texts = [[] for _ in FOUR]

    def all_told():
        for known, new in zip(texts, told(world), strict=True):
            known += new
        return all(texts)

    wait_for(all_told, 30.0)
    relay.rate = 0.0
    check_results(world)
    assert told(world) == [[]] * 4  # once is enough
    assert texts == [texts[0]] * 4 and len(texts[0]) == 1
    assert re.fullmatch(r"ring order 0 1 3 2: slowest link [0-9.e+]+ [GM]bit/s", texts[0][0])


def test_a_link_too_slow_to_be_measured(ring):
    world, relay = ring((0, 1), 6e3)  # a measurement would take 8 s, the limit for all is 5 s
    world.connect_by(relay)
    world.start("call", calls=[[["allreduce", "float32", {"count": 100}]]] * 4)
    assert all("error" not in result for result in world.lines().values())
    assert told(world) == [["ring order 0 1 2 3: the measurement of their bandwidths took longer than 5.0 s"]] * 4
