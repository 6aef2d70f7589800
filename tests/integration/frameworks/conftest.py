"""Ranks on engines in the test's process (tests/rig), forked from a process that has imported a framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rig.ranks import engine_hosts
from rig.ranks.engine_hosts import Ranks

DEADLINE_S = 240.0


@pytest.fixture(scope="session")
def run_in_ranks() -> Callable[..., list[str]]:
    """``run_in_ranks(folder, preload, function, nprocs, **arguments)``: what each rank printed."""

    def run(folder: Path, preload: Sequence[str], function: Any, /, nprocs: int = 2, **arguments: Any) -> list[str]:
        with ranks_with(folder, preload) as ranks:
            started = ranks.start(function, nprocs, **arguments)
            ranks.wait(DEADLINE_S)
            return [rank.output for rank in started]

    return run


@contextlib.contextmanager
def ranks_with(folder: Path, preload: Sequence[str]) -> Iterator[Ranks]:
    with engine_hosts.make_ranks(folder, tuple(preload)) as made:
        yield made
