"""Engines in the test's process, ranks as processes of their own (worker.py), everything on loopback."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig.engines import EngineJob, Program

sys.path.insert(0, str(Path(__file__).parent))  # for engine_relay

WORKER = Path(__file__).with_name("worker.py")


class World(EngineJob):
    """One job: an engine for each host and, after ``run`` or ``start``, a process for each rank."""

    def __init__(self, folder: Path, hosts: list[list[int]], **options: Any) -> None:
        self.key = secrets.token_bytes(32)
        super().__init__(folder, hosts, **{"connect_timeout_s": 10.0, "job_key": self.key, **options})

    def task(self, rank: int, script: str, **arguments: Any) -> dict[str, Any]:
        return super().task(rank, script, world=len(self.tokens), args=arguments)

    def start(self, script: str, only: list[int] | None = None, **arguments: Any) -> None:
        for rank in only if only is not None else self.tokens:
            self.ranks[rank] = Program(f"rank {rank}", WORKER, self.task(rank, script, **arguments))

    def run(self, script: str, **arguments: Any) -> dict[int, dict[str, Any]]:
        """Runs one script on all ranks; their results."""
        self.connect()
        self.start(script, **arguments)
        return self.lines()


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
