"""Jobs on hosts that are processes, ended at the end of the test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the package plane, whose programs import it too

from plane.world import Hosts, Job
from rig.peer_relay import Relay


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
    """``make_job(layout, hosts=..., relays=..., **engine_options)`` -> Job whose ranks have joined. A list given as
    ``relays`` is filled with one relay for each host, through which the others reach it."""
    made = []
    relaying = []

    def make(layout, hosts=None, relays=None, **options):
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
def operation_bytes(request):
    """How large the operations are during which something goes wrong."""
    return 64 << 20 if request.config.getoption("--full") else 8 << 20
