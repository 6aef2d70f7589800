"""Engines in the test's process, ranks as processes of their own (worker.py), everything on loopback."""

from __future__ import annotations

import json
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua.csrc import load

sys.path.insert(0, str(Path(__file__).parent))  # for engine_relay

WORKER = Path(__file__).with_name("worker.py")


class World:
    """One job: an engine for each host and, after ``run`` or ``start``, a process for each rank."""

    def __init__(self, folder: Path, hosts: list[list[int]], **options: Any) -> None:
        core = load()
        self.hosts = hosts
        self.tokens = {rank: secrets.token_bytes(32) for host in hosts for rank in host}
        self.key = options.pop("key", secrets.token_bytes(32))
        self.sockets = [str(folder / f"{secrets.token_hex(4)}.sock") for _ in hosts]
        settings = {"listen": "127.0.0.1:0", "connect_timeout_s": 10.0, "job_id": "test", "generation": 1, **options}
        encryption = settings.pop("encryption", "beyond loopback")  # for all hosts, or one for each
        self.engines = [
            core.Engine(
                **settings,
                encryption=encryption if isinstance(encryption, str) else encryption[index],
                host_index=index,
                hosts=hosts,
                data_socket=self.sockets[index],
                tokens={rank: self.tokens[rank] for rank in ranks},
                job_key=self.key if isinstance(self.key, bytes) else self.key[index],
            )
            for index, ranks in enumerate(hosts)
        ]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def connect(self) -> None:
        for engine in self.engines:
            engine.set_peers([peer.address() for peer in self.engines])

    def task(self, rank: int, script: str, **arguments: Any) -> dict[str, Any]:
        host = next(index for index, ranks in enumerate(self.hosts) if rank in ranks)
        return {
            "core": load().__file__,
            "socket": self.sockets[host],
            "token": self.tokens[rank].hex(),
            "rank": rank,
            "world": len(self.tokens),
            "script": script,
            "args": arguments,
        }

    def start(self, script: str, only: list[int] | None = None, **arguments: Any) -> None:
        for rank in only if only is not None else self.tokens:
            command = [sys.executable, str(WORKER), json.dumps(self.task(rank, script, **arguments))]
            self.processes[rank] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def line(self, rank: int, timeout: float = 60.0) -> dict[str, Any]:
        """The next line that ``rank`` prints."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], timeout)
        assert ready, f"rank {rank} said nothing for {timeout} s"
        text = stdout.readline()
        assert text, f"rank {rank} ended without a result"
        result: dict[str, Any] = json.loads(text)
        return result

    def lines(self, ranks: list[int] | None = None, timeout: float = 60.0) -> dict[int, dict[str, Any]]:
        return {rank: self.line(rank, timeout) for rank in (ranks if ranks is not None else self.processes)}

    def run(self, script: str, **arguments: Any) -> dict[int, dict[str, Any]]:
        """Runs one script on all ranks; their results."""
        self.connect()
        self.start(script, **arguments)
        return self.lines()

    def go_on(self, rank: int) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(b"\n")
        stdin.flush()

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].wait()

    def stop(self) -> None:
        for engine in self.engines:
            engine.close()
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., World]]:
    """``make_world(hosts, **engine_options)`` -> World; stopped at the end."""
    worlds: list[World] = []

    def make(hosts: list[list[int]], **options: Any) -> World:
        worlds.append(World(tmp_path_factory.mktemp("e", numbered=True), hosts, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.stop()


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """``wait_for(condition, seconds)``: returns when the condition holds, fails otherwise."""

    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    return wait
