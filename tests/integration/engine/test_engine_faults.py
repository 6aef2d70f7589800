"""Whole hosts that stall, crawl or vanish under load: who is named, what it costs, what is left behind.

Every engine is a process of its own, and all that host 0 sends to host 1 goes through relays of this process.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_relay import Relay

from bagua.csrc import load

HERE = Path(__file__).parent
COUNT = 1 << 20  # float32: the whole segment of a worker
MEMORY = 256 << 20  # bytes that the process of an engine may have while its peer takes nothing


class Process:
    """A program that answers lines with JSON lines."""

    def __init__(self, script: str, task: dict[str, Any], prefix: list[str]) -> None:
        command = [*prefix, sys.executable, str(HERE / script), json.dumps(task)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line.encode() + b"\n")

    def line(self, timeout: float = 60.0) -> dict[str, Any]:
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], timeout)
        assert ready, f"nothing came for {timeout} s"
        text = self.popen.stdout.readline()
        assert text, "the process ended without an answer"
        answer: dict[str, Any] = json.loads(text)
        return answer

    def ask(self, line: str, timeout: float = 60.0) -> dict[str, Any]:
        self.tell(line)
        return self.line(timeout)

    def end(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.communicate()


class Pair:
    """Two hosts with one rank each."""

    def __init__(self, folder: Path, namespaces: list[str] | None = None, **options: Any) -> None:
        key = secrets.token_hex(32)
        self.tokens = [secrets.token_hex(32) for _ in range(2)]
        self.sockets = [str(folder / f"{host}.sock") for host in range(2)]
        self.prefixes = [["ip", "netns", "exec", name] for name in namespaces] if namespaces else [[], []]
        listen = ["10.77.1.1:0", "10.77.1.2:0"] if namespaces else ["127.0.0.1:0"] * 2
        self.core = load().__file__
        self.ranks: list[Process] = []
        self.hosts = [
            Process(
                "host.py",
                {
                    "core": self.core, "socket": self.sockets[host], "tokens": {host: self.tokens[host]}, "key": key,
                    "host": host, "hosts": [[0], [1]], "listen": listen[host], "options": options,
                },
                self.prefixes[host],
            )
            for host in range(2)
        ]  # fmt: skip
        addresses = [host.line()["address"] for host in self.hosts]
        self.relay = None if namespaces else Relay(addresses[1])
        for host in self.hosts:
            host.ask("peers " + json.dumps([addresses[0], self.relay.address if self.relay else addresses[1]]))

    def start(self, script: str, **arguments: Any) -> None:
        for rank in range(2):
            task = {
                "core": self.core, "socket": self.sockets[rank], "token": self.tokens[rank], "rank": rank, "world": 2,
                "script": script, "args": arguments,
            }  # fmt: skip
            self.ranks.append(Process("worker.py", task, self.prefixes[rank]))

    def load(self) -> None:
        """All-reduces without end; returns when they run."""
        self.start("endless", count=COUNT)
        for rank in self.ranks:
            assert rank.line() == {"ready": True}
        time.sleep(0.2)

    def stop(self) -> None:
        for process in [*self.ranks, *self.hosts]:
            process.end()
        if self.relay is not None:
            self.relay.close()


@pytest.fixture
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(tmp_path_factory.mktemp("f", numbered=True), **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.stop()


def check_end(pair: Pair, host: int, named: str) -> str:
    """Host ``host`` fails and says ``named``; its rank hears it; nothing is left. The error."""
    found = pair.hosts[host].ask("error")
    assert named in found["text"], found["text"]
    assert found["bytes"] < MEMORY, "a host's memory grew while its peer took nothing"
    assert found["text"] in pair.ranks[host].line()["error"]
    left = pair.hosts[host].ask("closed")
    assert (left["fds"], left["threads"]) == (0, 0)
    text: str = found["text"]
    return text


def await_text(host: Process, part: str) -> None:
    deadline = time.monotonic() + 30
    while part not in (text := host.ask("waiting 0.1")["text"]):
        assert time.monotonic() < deadline, f"'{text}' lacks '{part}'"


def test_a_stalled_host_is_named(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(peer_timeout_s=3.0)
    pair.load()
    pair.hosts[1].popen.send_signal(signal.SIGSTOP)
    await_text(pair.hosts[0], "host 1 (rank 1)")
    await_text(pair.hosts[0], "has not answered for")
    text = check_end(pair, 0, "host 1 (rank 1) has not answered for ")
    assert "all-reduce" in text
    pair.hosts[1].popen.send_signal(signal.SIGCONT)
    # It hears what host 0 said meanwhile: the cause, not merely that host 0 has closed.
    check_end(pair, 1, "host 1 (rank 1) has not answered for ")


def test_a_host_that_is_cut_off_silently(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(peer_timeout_s=2.0)
    pair.load()
    assert pair.relay is not None
    pair.relay.going.clear()
    check_end(pair, 0, "host 1 (rank 1) has not answered for ")
    check_end(pair, 1, "host 0 (rank 0)")


def test_a_connection_that_is_reset_under_load(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.load()
    assert pair.relay is not None
    pair.relay.reset()
    check_end(pair, 0, "lost host 1 (rank 1)")
    check_end(pair, 1, "host 0 (rank 0)")


def test_slow_is_not_silent(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(peer_timeout_s=0.5, chunk_bytes=1 << 20)
    assert pair.relay is not None
    pair.relay.rate = 600_000.0  # bytes per second and stream: 4 MiB take seconds, much longer than the timeout
    pair.start("call", calls=[[["allreduce", "float32", {"count": COUNT}]]] * 2)
    for rank in pair.ranks:
        assert "error" not in rank.line()
    for host in pair.hosts:
        host.tell("closed")  # together: each waits for the other's goodbye
    assert [(left["fds"], left["threads"]) for left in (host.line() for host in pair.hosts)] == [(0, 0)] * 2


def test_what_was_sent_before_a_communicator_ends_arrives(make_pair: Callable[..., Pair]) -> None:
    """One host has destroyed it while what it sent is still on a slow way."""
    pair = make_pair(streams=2)
    assert pair.relay is not None
    pair.start("early", count=COUNT)
    assert pair.ranks[1].line() == {"ready": True}
    pair.relay.rate = 800_000.0  # bytes per second and stream: seconds for the 4 MiB
    for comm in (5, 6):
        assert pair.ranks[0].line() == {"destroyed": comm}
        time.sleep(0.5)
        pair.ranks[0].tell("")
    pair.ranks[1].tell("")
    assert [rank.line() for rank in pair.ranks] == [{"right": True}] * 2


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces joined by a pair of devices named veth0."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the program 'ip'")
    names = [f"bagua-{os.getpid()}-{host}" for host in range(2)]

    def ip(*arguments: str, check: bool = True) -> None:
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


def cut(name: str) -> None:
    """Both ends of the cable go: nothing is delivered and nobody is told."""
    subprocess.run(["ip", "-n", name, "link", "set", "veth0", "down"], check=True)


def test_a_cut_cable(make_pair: Callable[..., Pair], namespaces: list[str]) -> None:
    pair = make_pair(namespaces=namespaces, peer_timeout_s=2.0)
    pair.load()
    cut(namespaces[1])
    check_end(pair, 0, "host 1 (rank 1) has not answered for ")
    check_end(pair, 1, "host 0 (rank 0)")


@pytest.mark.full
def test_a_cut_cable_is_seen_in_the_connection(make_pair: Callable[..., Pair], namespaces: list[str]) -> None:
    pair = make_pair(namespaces=namespaces, peer_timeout_s=600.0)
    pair.load()
    cut(namespaces[1])
    check_end(pair, 0, "lost host 1 (rank 1): nothing has been acknowledged for ")
