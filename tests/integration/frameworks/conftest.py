"""Ranks on engines in the test's process (tests/rig), forked from a process that has imported a framework."""

import contextlib

import pytest
from rig.ranks import engine_hosts

DEADLINE_S = 240.0


@pytest.fixture(scope="session")
def run_in_ranks():
    """``run_in_ranks(folder, preload, function, nprocs, **arguments)``: what each rank printed."""

    def run(folder, preload, function, /, nprocs=2, **arguments):
        with ranks_with(folder, preload) as ranks:
            started = ranks.start(function, nprocs, **arguments)
            ranks.wait(DEADLINE_S)
            return [rank.output for rank in started]

    return run


@contextlib.contextmanager
def ranks_with(folder, preload):
    with engine_hosts.make_ranks(folder, tuple(preload)) as made:
        yield made
