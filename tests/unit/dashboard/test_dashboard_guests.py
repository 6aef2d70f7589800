"""Connections to the dashboard that have shown no session."""

import asyncio

import pytest

from bagua.dashboard.guests import Guests


class Transport:
    def __init__(self, host, port):
        self.peer, self.aborted = (host, port), False

    def get_extra_info(self, name):
        return self.peer if name == "peername" else None

    def abort(self):
        self.aborted = True


@pytest.mark.parametrize("network", ["10.0.0.2", "2001:db8::{}"])
async def test_the_network_with_most_makes_room(network):
    guests = Guests(most=3, patience_s=1e6)
    alone, *crowd = [Transport("10.0.0.1", 1), *(Transport(network.format(port), port) for port in range(1, 5))]
    for one in (alone, *crowd[:2]):
        guests.arrive(one)
    guests.admit(crowd[0].peer)  # it shows a session, and counts no more
    for one in crowd[2:]:
        guests.arrive(one)
    assert [one.aborted for one in (alone, *crowd)] == [False, False, True, False, False]


async def test_patience_ends():
    guests = Guests(patience_s=0.0)
    silent, known = Transport("10.0.0.1", 1), Transport("10.0.0.1", 2)
    for one in (silent, known):
        guests.arrive(one)
    guests.admit(known.peer)
    while not silent.aborted:
        await asyncio.sleep(0)
    assert not known.aborted
