"""Networks as they are written, their floors, and how they are found from measured messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.tuning.network import Network, fit_network, parse_network


@pytest.mark.parametrize(
    ("text", "rate", "delay"),
    [
        ("1gbit", 1e9, 0.0),
        ("100mbit,5ms", 1e8, 0.005),
        ("none", 0.0, 0.0),
        ("none,500us", 0.0, 0.0005),
        ("2.5gbit,1s", 2.5e9, 1.0),
        ("500kbit", 5e5, 0.0),
    ],
)
def test_networks(text, rate, delay):
    network = parse_network(text)
    assert network == Network(rate, pytest.approx(delay))
    assert parse_network(network.name) == network


def test_floor_of_a_network():
    # Reference figures of this repository's performance notes: 64 MiB at 1 Gbit/s take about 561 ms.
    assert parse_network("1gbit").floor_s(64 << 20, 1) == pytest.approx(0.559, abs=0.003)
    assert parse_network("1gbit").floor_s(4096, 1) == 0.0
    assert parse_network("1gbit,5ms").floor_s(64 << 20, 1) == pytest.approx(0.566, abs=0.003)
    assert parse_network("none,5ms").floor_s(1e9, 2) == pytest.approx(0.01)


@given(st.floats(1e6, 1e11), st.floats(0, 1), st.lists(st.integers(1000, 10**8), min_size=4, max_size=12, unique=True))
def test_a_fit_finds_the_network(rate, delay, sizes):
    truth = Network(rate, delay)
    samples = [(size, size / truth.payload_rate + 2 * delay) for size in sizes]
    found = fit_network(samples, trips=2)
    assert found.payload_rate == pytest.approx(truth.payload_rate, rel=1e-2)
    assert found.delay_s == pytest.approx(delay, abs=max(samples)[1] * 1e-6)
