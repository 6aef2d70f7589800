"""Sizes, rates and networks on the command line of the benchmarks."""

from __future__ import annotations

import pytest

from bagua.base.errors import ConfigError
from bagua.bench.units import Network, choose, parse_network, parse_size, parse_sizes, size_text


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("4K", 4096), ("64KiB", 65536), ("1M", 1 << 20), ("2G", 2 << 30), (" 16M ", 16 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "K", "-4K", "4k", "1.5M", "65G", "4 K"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


def test_lists_keep_order_and_drop_repeats() -> None:
    assert parse_sizes("64K,4K,64K") == [65536, 4096]
    with pytest.raises(ConfigError, match="empty"):
        parse_sizes(" , ")
    assert choose("b,a", ("a", "b"), "--x") == ["b", "a"]
    with pytest.raises(ConfigError, match="--x 'c': choose from a, b"):
        choose("a,c", ("a", "b"), "--x")


@pytest.mark.parametrize(
    ("size", "text"), [(4096, "4 KiB"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB"), (1000, "1000 B"), (1536, "1536 B")]
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert size_text(size) == text


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
def test_networks(text: str, rate: float, delay: float) -> None:
    network = parse_network(text)
    assert network == Network(rate, pytest.approx(delay))
    assert parse_network(network.name) == network


@pytest.mark.parametrize("text", ["", "fast", "1gb", "1gbit,", "1gbit,5", "1gbit,5ms,1", "0mbit", "1kbit", "1gbit,11s"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"network|must be"):
        parse_network(text)


def test_the_bucket_has_2_ms_and_at_least_16_kib() -> None:
    assert parse_network("1gbit").burst_bytes == 250_000
    assert parse_network("10mbit").burst_bytes == 16384
    assert parse_network("none,5ms").burst_bytes == 0


def test_floor_of_a_network() -> None:
    # Reference figures of this repository's performance notes: 64 MiB at 1 Gbit/s take about 561 ms.
    assert parse_network("1gbit").floor_s(64 << 20, 1) == pytest.approx(0.559, abs=0.003)
    assert parse_network("1gbit").floor_s(4096, 1) == 0.0
    assert parse_network("1gbit,5ms").floor_s(64 << 20, 1) == pytest.approx(0.566, abs=0.003)
    assert parse_network("none,5ms").floor_s(1e9, 2) == pytest.approx(0.01)
