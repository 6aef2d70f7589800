"""Jobs on hosts that are processes, ended at the end of the test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the package plane, whose programs import it too

from plane.world import Hosts, Job


@pytest.fixture
def make_hosts():
    """``make_hosts(number)`` -> Hosts."""
    made = []

    def make(number):
        made.append(Hosts(number))
        return made[-1]

    yield make
    for hosts in made:
        hosts.end()


@pytest.fixture
def make_job(make_hosts):
    """``make_job(layout, hosts=..., **engine_options)`` -> Job whose ranks have joined."""
    made = []

    def make(layout, hosts=None, **options):
        made.append(Job(hosts or make_hosts(len(layout)), layout, **options))
        return made[-1].start()

    yield make
    for job in made:
        job.end()
