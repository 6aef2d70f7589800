"""Runs jobs on ranks of one world, and compares what they found with one process of plain torch."""

import os
import sys
import time

import pytest
import torch
from contract.algorithms import load_cases, rank_side
from contract.algorithms.case import WORLDS, Simulation, flat
from rig.ranks.engine_hosts import make_ranks

from bagua.base import islands

DEADLINE_S = 1500.0  # ranks end hangs themselves, job by job
UNTIL = float(os.environ.get("BAGUA_TEST_UNTIL", "inf"))
"""By the monotonic clock: what ranks have not done then is left, where there are minutes for it (tests/gpu)."""
LOOSE = 5e-3  # between processors that round differently; what is sent in error is off by more


def selected(request, function, world=""):
    """Names of the cases, of one world or of all, for which the test of that name is run."""
    items = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec.params for item in items if item.originalname == function]
    return [call["name"] for call in calls if not world or call["world"] == world]


class Runner:
    """Runs the jobs of the selected tests of one world when the first of them is asked for."""

    def __init__(self, world, names, folder, environment=None):
        """``folder``: makes one. ``environment``: more variables of the ranks."""
        self.world = WORLDS[world]
        self._left = names
        self._folder = folder
        self._environment = environment or {}
        self._found = {}
        self._cut = ""

    def result(self, name):
        """Returns the results of all ranks of a job. Fails the test with the ranks' errors if one failed.

        If ranks are interrupted, or their time is over, KeyboardInterrupt is raised for the first job that was not
        done: the tests before that are told."""
        while name not in self._found:
            if self._cut:
                raise KeyboardInterrupt(self._cut)
            self._run()
        found = self._found[name]
        errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(found) if "error" in one]
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)
        return [one["result"] for one in found]

    def _run(self):
        folder = self._folder()
        with make_ranks(folder) as ranks:
            started = ranks.start(
                rank_side.rank_jobs,
                hosts=list(map(self.world.ranks_of, self.world.hosts)),
                environment={**self._environment, islands.VARIABLE: str(self.world.island)},
                names=self._left,
                folder=str(folder),
            )
            try:
                ranks.wait(max(0.0, min(DEADLINE_S, UNTIL - time.monotonic())))
            except (KeyboardInterrupt, pytest.fail.Exception):
                if sys.exc_info()[0] is not KeyboardInterrupt and time.monotonic() < UNTIL:
                    raise
                self._cut = " ".join(filter(None, (host.engine.waiting(0.0) for host in ranks.hosts))) or "nobody waits"
            outputs = [rank.output for rank in started]
        for number, name in enumerate(self._left):
            files = [folder / f"{number}-{rank}.pt" for rank in self.world.ranks_of(range(self.world.n))]
            if self._cut and not all(file.exists() for file in files):
                return
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


def training(case, world):
    """Parameters of all ranks, by the reference, after each step."""
    torch.set_num_threads(1)  # as in ranks: another number of threads adds in another order
    sim = Simulation(case, WORLDS[world])
    for _ in case.reference(sim):
        yield [flat(model) for model in sim.models]


def check_reference(name, world, found, loose=False):
    """Parameters of every rank after every step are those of the reference; ``loose``: but for rounding."""
    case = load_cases()[name]
    steps = list(training(case, world))
    assert len(steps) == case.steps == len(found[0])
    for step, wanted in enumerate(steps):
        allowed = max(case.allowed(WORLDS[world], step), LOOSE if loose else 0.0)
        for rank, mine in enumerate(found):
            error = (mine[step] - wanted[rank // WORLDS[world].island]).abs().max().item()
            assert error <= allowed, f"step {step}, rank {rank}: differs by {error:.3g}, more than {allowed:.3g}"
