"""Sizes and lists on the command line of the benchmarks."""

from __future__ import annotations

import pytest

from bagua.base.errors import ConfigError
from bagua.bench.units import choose, parse_size, parse_sizes, size_text


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
