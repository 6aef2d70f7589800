"""Every algorithm on real ranks of real engines, on one or two hosts, against one process of plain torch.

Ranks are started once per world and do one job after the other: the cases of tests/contract/algorithms, and the checks
that every algorithm must stand. After an error they are started again for the jobs that are left.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.algorithms import load_cases, rank_side
from contract.algorithms.case import TWO_HOSTS, WORLDS, Case, Simulation, flat, volume_model
from contract.algorithms.general import CHECKS
from contract.algorithms.mistakes import MISTAKES
from contract.algorithms.subjects import registered_names
from rig.engine_hosts import make_ranks

CASES = load_cases()
DEADLINE_S = 1500.0  # ranks end hangs themselves, job by job
pytestmark = pytest.mark.timeout(1600)  # the first test of a world waits for all its jobs


class Runner:
    """Runs the jobs of the selected tests of one world when the first of them is asked for."""

    def __init__(self, world: str, names: list[str], folder: Callable[[], Path]) -> None:
        self.world = WORLDS[world]
        self._left = names
        self._folder = folder
        self._found: dict[str, list[Any]] = {}

    def result(self, name: str) -> list[Any]:
        """What every rank returned in a job. Fails the test with the ranks' errors if one failed."""
        while name not in self._found:
            self._run()
        found = self._found[name]
        errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if "error" in one]
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)
        return [one["result"] for one in found]

    def _run(self) -> None:
        folder = self._folder()
        with make_ranks(folder) as ranks:
            hosts = self.world.hosts
            started = ranks.start(rank_side.rank_jobs, hosts=hosts, names=self._left, folder=str(folder))
            ranks.wait(DEADLINE_S)
            outputs = [rank.output for rank in started]
        for number, name in enumerate(self._left):
            files = [folder / f"{number}-{rank}.pt" for rank in range(self.world.n)]
            if not any(file.exists() for file in files):
                # The ranks ended in the job before this one, which says so, or in this one.
                ended = number == 0 or not any("error" in one for one in self._found[self._left[number - 1]])
                if ended:
                    self._found[name] = [{"error": f"ended\n{output[-4000:]}"} for output in outputs]
                self._left = self._left[number + ended :]
                return
            self._found[name] = [
                torch.load(file, weights_only=False) if file.exists() else {"error": f"ended\n{output[-4000:]}"}
                for file, output in zip(files, outputs, strict=True)
            ]
        self._left = []


@pytest.fixture(scope="session")
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runner]:
    """A runner for every world, which knows the jobs of all tests that were selected."""
    jobs: dict[str, list[str]] = {}
    for item in request.session.items:
        marker = item.get_closest_marker("job")
        if marker is not None:
            world, name = marker.args
            jobs.setdefault(world, []).append(name)
    return {world: Runner(world, names, lambda: tmp_path_factory.mktemp("ranks")) for world, names in jobs.items()}


OFTEN = ("1 rank", "4 ranks", "2 hosts x 2", "2 hosts, 1 and 2")
"""Where references are compared without --full. Bytes are counted on two hosts of one rank then."""


def in_world(world: str, name: str, *values: Any, full: bool = False) -> Any:
    """Parameters of a test that needs the results of a job in a world; ``full``: with --full only."""
    marks = [pytest.mark.job(world, name)]
    if full:
        marks.append(pytest.mark.full)
    return pytest.param(world, *values, marks=marks, id=f"{world}-{values[-1]}")


def often_enough(world: str, check: str) -> bool:
    """Whether a check is made in a world without --full: each where it is most likely to fail."""
    return world == ("2 hosts, 1 and 2" if check in MISTAKES else "2 hosts x 2")


def training(case: Case, world: str) -> Iterator[list[torch.Tensor]]:
    """Parameters of all ranks, by the reference, after each step."""
    torch.set_num_threads(1)  # as in ranks: another number of threads adds in another order
    sim = Simulation(case, WORLDS[world])
    for _ in case.reference(sim):
        yield [flat(model) for model in sim.models]


@pytest.mark.parametrize(
    ("world", "name"),
    [
        in_world(world, f"case {name}", name, full=world not in OFTEN)
        for world in WORLDS
        for name in CASES
        if world in CASES[name].worlds
    ],
)
def test_equals_reference(runners: dict[str, Runner], world: str, name: str) -> None:
    """Step by step, on every rank."""
    found = runners[world].result(f"case {name}")
    steps = list(training(CASES[name], world))
    assert len(steps) == CASES[name].steps == len(found[0])
    for step, wanted in enumerate(steps):
        allowed = CASES[name].allowed(WORLDS[world], step)
        for rank, values in enumerate(wanted):
            error = (found[rank][step] - values).abs().max().item()
            assert error <= allowed, f"step {step}, rank {rank}: differs by {error:.3g}, more than {allowed:.3g}"


MEASURED = [name for name in CASES if CASES[name].bytes_sent is not None]


@pytest.mark.parametrize(
    ("world", "name"),
    [
        in_world(world, f"volume {name}", name, full=world != "2 hosts x 1")
        for world in TWO_HOSTS
        for name in MEASURED
        if world in CASES[name].worlds
    ],
)
def test_volume_on_the_wire(runners: dict[str, Runner], world: str, name: str) -> None:
    """Bytes that a host sends per step are those of the formula."""
    case = CASES[name]
    assert case.bytes_sent is not None
    wanted = case.bytes_sent(WORLDS[world], volume_model())
    found = runners[world].result(f"volume {name}")[0]
    assert abs(found - wanted) <= case.slack * wanted + 2048, f"{found:.0f} bytes per step, {wanted:.0f} by the formula"


@pytest.mark.parametrize(
    ("world", "rounds"),
    [
        pytest.param("2 hosts x 2", 6, marks=pytest.mark.job("2 hosts x 2", "switch 6")),
        pytest.param("2 hosts x 2", 10, marks=[pytest.mark.job("2 hosts x 2", "switch 10"), pytest.mark.full]),
    ],
)
def test_switching_leaks_nothing(runners: dict[str, Runner], world: str, rounds: int) -> None:
    """Through all algorithms, again and again; the first two rounds warm up."""
    for rank, found in enumerate(runners[world].result(f"switch {rounds}")):
        first, last = found[1], found[-1]
        grown = {name: (value, last[name]) for name, value in first.items() if last[name] > value and name != "memory"}
        assert not grown, f"rank {rank}: {grown}"
        # An algorithm that kept one model of 1 MiB would keep one in every round. The allocator grows too, by up to
        # some MiB in one round, but not in each.
        sizes = [one["memory"] for one in found[1:]]
        least = min(after - before for before, after in pairwise(sizes))
        assert least < 3 * 2**18, f"rank {rank}: {sizes}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Checks for all registered algorithms, or for those that --algorithm names, in all worlds."""
    if "check" not in metafunc.fixturenames:
        return
    own = metafunc.config.getoption("--algorithm")
    metafunc.parametrize(
        ("world", "subject", "check"),
        [
            in_world(
                world,
                f"check {subject} {check}",
                subject,
                f"{subject}-{check}",
                full=not own and not often_enough(world, check),
            )
            for world in WORLDS
            for subject in own or registered_names()
            for check in (*CHECKS, *MISTAKES)
        ],
    )


def test_stands(runners: dict[str, Runner], world: str, subject: str, check: str) -> None:
    """A check that every algorithm must stand."""
    runners[world].result(f"check {subject} {check.rpartition('-')[2]}")


def test_algorithm_of_ones_own() -> None:
    """The suite is open to algorithms that it does not know."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "trains and 2 and x and 1-",
    ]
    command += ["--algorithm", "bagua.algorithms:ByteGradAlgorithm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
