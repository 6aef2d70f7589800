"""Jobs on hosts that are processes, ended at the end of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the package plane, whose programs import it too

from plane.world import Hosts, Job

MakeJob = Callable[..., Job]


@pytest.fixture
def make_hosts() -> Iterator[Callable[[int], Hosts]]:
    """``make_hosts(number)`` -> Hosts."""
    made: list[Hosts] = []

    def make(number: int) -> Hosts:
        made.append(Hosts(number))
        return made[-1]

    yield make
    for hosts in made:
        hosts.end()


@pytest.fixture
def make_job(make_hosts: Callable[[int], Hosts]) -> Iterator[MakeJob]:
    """``make_job(layout, hosts=..., **engine_options)`` -> Job whose ranks have joined."""
    made: list[Job] = []

    def make(layout: Sequence[Sequence[int]], hosts: Hosts | None = None, **options: Any) -> Job:
        made.append(Job(hosts or make_hosts(len(layout)), layout, **options))
        return made[-1].start()

    yield make
    for job in made:
        job.end()
