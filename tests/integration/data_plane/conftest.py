"""Jobs on hosts that are processes, ended at the end of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the package plane, whose programs import it too

from plane.relay import Relay
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
    """``make_job(layout, hosts=..., relays=..., **engine_options)`` -> Job whose ranks have joined. A list given as
    ``relays`` is filled with one relay for each host, through which the others reach it."""
    made: list[Job] = []
    relaying: list[Relay] = []

    def make(
        layout: Sequence[Sequence[int]], hosts: Hosts | None = None, relays: list[Relay] | None = None, **options: Any
    ) -> Job:
        job = Job(hosts or make_hosts(len(layout)), layout, **options)
        made.append(job)
        if relays is not None:
            relays += [Relay(address) for address in job.addresses]
            relaying.extend(relays)
            job.addresses = [relay.address for relay in relays]
        return job.start()

    yield make
    for job in made:
        job.end()
    for relay in relaying:
        relay.close()


@pytest.fixture
def operation_bytes(request: pytest.FixtureRequest) -> int:
    """How large the operations are during which something goes wrong."""
    return 64 << 20 if request.config.getoption("--full") else 8 << 20
