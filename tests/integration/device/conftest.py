"""Engines in the test's process, ranks with a GPU leg over the fakes of tests/native/leg as processes."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua.csrc import load, load_device

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "native" / "leg"))  # for the fakes

import fakes  # noqa: E402


class Job:
    """An engine for each host and a process for each rank; a lost rank ends the job, as the node daemon does it."""

    def __init__(self, folder: Path, hosts: list[list[int]], libraries: Path) -> None:
        core = load()
        self.hosts = hosts
        self.libraries = libraries
        self.tokens = {rank: secrets.token_bytes(32) for host in hosts for rank in host}
        self.sockets = [str(folder / f"{secrets.token_hex(4)}.sock") for _ in hosts]
        self.engines = [
            core.Engine(
                job_id="test",
                generation=1,
                host_index=index,
                hosts=hosts,
                data_socket=self.sockets[index],
                tokens={rank: self.tokens[rank] for rank in ranks},
                job_key=b"k" * 32,
                listen="127.0.0.1:0",
            )
            for index, ranks in enumerate(hosts)
        ]
        for engine in self.engines:
            engine.set_peers([peer.address() for peer in self.engines])
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.of_rank: dict[int, dict[str, str]] = {}  # variables of single ranks

    def start(self, script: str, environment: dict[str, str] | None = None, **arguments: Any) -> None:
        """Runs a function of leg_scripts ("results.kinds") on all ranks. Every rank has a GPU of its own unless
        ``environment`` says otherwise."""
        for rank, token in self.tokens.items():
            host = next(index for index, ranks in enumerate(self.hosts) if rank in ranks)
            task = {
                "core": load().__file__,
                "device": load_device().__file__,
                "socket": self.sockets[host],
                "token": token.hex(),
                "rank": rank,
                "hosts": self.hosts,
                "script": script,
                "arguments": arguments,
            }
            variables = {
                **os.environ,
                **fakes.environment(self.libraries),
                "FAKE_CUDA_BUS_ID": f"0000:{rank:02x}:00.0",
                "OPENBLAS_NUM_THREADS": "1",
                **(environment or {}),
                **self.of_rank.get(rank, {}),
            }
            command = [sys.executable, str(HERE / "leg_rank.py"), json.dumps(task)]
            self.processes[rank] = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )

    def line(self, rank: int, timeout_s: float = 90.0) -> Any:
        """The next line that ``rank`` prints, decoded."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], timeout_s)
        waiting = "\n".join(engine.waiting(0.0) for engine in self.engines)
        assert ready, f"rank {rank} said nothing for {timeout_s} s\n{waiting}"
        text = stdout.readline()
        assert text, f"rank {rank} ended without a result"
        return json.loads(text)

    def lines(self) -> dict[int, Any]:
        return {rank: self.line(rank) for rank in self.processes}

    def run(self, script: str, environment: dict[str, str] | None = None, **arguments: Any) -> dict[int, Any]:
        """``start``; the results of all ranks. No rank may have misused CUDA or NCCL, or waited where it must not."""
        self.start(script, environment, **arguments)
        results = self.lines()
        for rank, result in results.items():
            assert "raised" not in result, f"rank {rank}: {result['raised']}"
            assert result["misuse"] == [], f"rank {rank}: {result['misuse']}"
        return results

    def go_on(self, rank: int) -> None:
        """Ends a ``pause`` of a script."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(b"\n")

    def kill(self, rank: int) -> None:
        """Kills it, and ends the job as the node daemon would."""
        self.processes[rank].kill()
        self.processes[rank].wait()
        self.engine_of(rank).abort(f"rank {rank} was lost")

    def engine_of(self, rank: int) -> Any:
        return next(engine for engine, ranks in zip(self.engines, self.hosts, strict=True) if rank in ranks)

    def stop(self) -> None:
        for engine in self.engines:
            engine.close()
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def libraries(request: pytest.FixtureRequest) -> Path:
    """The folder of the fakes."""
    given = os.environ.get("BAGUA_CACHE_DIR")
    cache = request.config.cache
    assert cache is not None
    return fakes.build(Path(given) / "native-tests" if given else Path(cache.mkdir("device-fakes")))


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
