"""Engines in the test's process, ranks with a GPU leg over the fakes of tests/native/leg as processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig.engines import EngineJob, Program

from bagua.csrc import load_device

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "native" / "leg"))  # for the fakes

import fakes  # noqa: E402


class Job(EngineJob):
    """An engine for each host and a process for each rank; a lost rank ends the job, as the node daemon does it."""

    def __init__(self, folder: Path, hosts: list[list[int]], libraries: Path) -> None:
        super().__init__(folder, hosts)
        self.connect()
        self.libraries = libraries
        self.of_rank: dict[int, dict[str, str]] = {}  # variables of single ranks

    def start(self, script: str, environment: dict[str, str] | None = None, **arguments: Any) -> None:
        """Runs a function of leg_scripts ("results.kinds") on all ranks. Every rank has a GPU of its own unless
        ``environment`` says otherwise."""
        device = load_device().__file__
        for rank in self.tokens:
            task = self.task(rank, script, device=device, hosts=self.hosts, arguments=arguments)
            variables = {
                **fakes.environment(self.libraries),
                "FAKE_CUDA_BUS_ID": f"0000:{rank:02x}:00.0",
                **(environment or {}),
                **self.of_rank.get(rank, {}),
            }
            self.ranks[rank] = Program(f"rank {rank}", HERE / "leg_rank.py", task, variables)

    def run(self, script: str, environment: dict[str, str] | None = None, **arguments: Any) -> dict[int, Any]:
        """``start``; the results of all ranks. No rank may have misused CUDA or NCCL, or waited where it must not."""
        self.start(script, environment, **arguments)
        results = self.lines()
        for rank, result in results.items():
            assert "raised" not in result, f"rank {rank}: {result['raised']}"
            assert result["misuse"] == [], f"rank {rank}: {result['misuse']}"
        return results

    def kill(self, rank: int) -> None:
        """Kills it, and ends the job as the node daemon would."""
        super().kill(rank)
        self.engine_of(rank).abort(f"rank {rank} was lost")

    def engine_of(self, rank: int) -> Any:
        return self.engines[self.host_of(rank)]


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of the fakes."""
    return fakes.build(fakes.cache_folder())


@pytest.fixture
def make_job(tmp_path_factory: pytest.TempPathFactory, libraries: Path) -> Iterator[Callable[..., Job]]:
    """``make_job(hosts)`` -> Job; stopped at the end."""
    jobs: list[Job] = []

    def make(hosts: list[list[int]]) -> Job:
        jobs.append(Job(tmp_path_factory.mktemp("g", numbered=True), hosts, libraries))
        return jobs[-1]

    yield make
    for job in jobs:
        job.stop()
