"""Engines in the test's process, ranks with a GPU leg over the fakes of tests/native/leg as processes."""

import sys
from pathlib import Path

import pytest
from rig.engines import EngineJob, Program

from bagua.csrc import load_device

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "native" / "leg"))  # for the fakes

import fakes  # noqa: E402


class Job(EngineJob):
    """An engine for each host and a process for each rank; a lost rank ends the job, as the node daemon does it."""

    def __init__(self, folder, hosts, libraries):
        super().__init__(folder, hosts)
        self.connect()
        self.libraries = libraries

    def start(self, *cases, **environment):
        """Runs functions of leg_scripts on all ranks, one after the other: ``("results.kinds", {"route": "flat"})``,
        with variables of single ranks where there is a third, ``{rank: {name: value}}``. Every rank has a GPU of its
        own unless ``environment`` says otherwise."""
        device = load_device().__file__
        for rank in self.tokens:
            mine = [[name, arguments, more[0].get(rank, {}) if more else {}] for name, arguments, *more in cases]
            task = self.task(rank, "", device=device, hosts=self.hosts, cases=mine)
            variables = {
                **fakes.environment(self.libraries),
                "FAKE_CUDA_BUS_ID": f"0000:{rank:02x}:00.0",
                **environment,
            }
            self.ranks[rank] = Program(f"rank {rank}", HERE / "leg_rank.py", task, variables)

    def run(self, *cases, **environment):
        """``start``; a list with the results of all ranks for each case. No rank may have misused CUDA or NCCL, or
        waited where it must not."""
        self.start(*cases, **environment)
        found = []
        for name, *_ in cases:
            results = self.lines()
            for rank, result in results.items():
                assert "raised" not in result, f"{name}, rank {rank}: {result['raised']}"
                assert result["misuse"] == [], f"{name}, rank {rank}: {result['misuse']}"
            found.append([result["result"] for result in results.values()])
        return found

    def kill(self, rank):
        """Kills it, and ends the job as the node daemon would."""
        super().kill(rank)
        self.engines[self.host_of(rank)].abort(f"rank {rank} was lost")


@pytest.fixture(scope="session")
def libraries():
    """The folder of the fakes."""
    return fakes.build(fakes.cache_folder())


@pytest.fixture
def make_job(tmp_path_factory, libraries):
    """``make_job(hosts)`` -> Job; stopped at the end."""
    jobs = []

    def make(hosts):
        jobs.append(Job(tmp_path_factory.mktemp("g", numbered=True), hosts, libraries))
        return jobs[-1]

    yield make
    for job in jobs:
        job.stop()
