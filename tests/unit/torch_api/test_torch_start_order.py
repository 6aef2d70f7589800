"""The order in which buckets start."""

from __future__ import annotations

import pytest

from bagua.torch_api.train.execution import StartOrder


class Bucket:
    def __init__(self, name: str, log: list[str], pending: int = 1) -> None:
        self.name, self.log, self.pending, self.broken = name, log, pending, False

    def start(self) -> None:
        if self.broken:
            raise NotImplementedError(self.name)
        self.log.append(self.name)


def order_of(names: str) -> tuple[StartOrder[Bucket], list[str]]:
    log: list[str] = []
    return StartOrder([Bucket(name, log) for name in names]), log


def test_a_full_bucket_waits_for_those_before_it() -> None:
    order, log = order_of("abc")
    order.buckets[1].pending = 0
    order.start_full(3)
    assert log == []
    order.buckets[0].pending = 0
    order.start_full(3)
    assert log == ["a", "b"] and order.started == 2
    order.start_rest()
    assert log == ["a", "b", "c"] and order.started == 3


def test_buckets_from_the_end_on_are_held_back() -> None:
    order, log = order_of("ab")
    for bucket in order.buckets:
        bucket.pending = 0
    order.start_full(1)
    assert log == ["a"]


def test_a_bucket_that_could_not_start_is_not_counted() -> None:
    order, log = order_of("ab")
    order.buckets[0].pending, order.buckets[0].broken = 0, True
    with pytest.raises(NotImplementedError):
        order.start_full(2)
    assert order.started == 0 and log == []


def test_turns_go_round() -> None:
    order, log = order_of("ab")
    assert [order.take_next().name for _ in range(5)] == ["a", "b", "a", "b", "a"] and log == []
