"""Counters of the coordinator: plain numbers that ``metrics`` shows to Prometheus."""

from __future__ import annotations

from collections import Counter


class Counters:
    """Counts by name and label. Used from the event loop only."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, label: str = "", number: int = 1) -> None:
        self.values[name, label] += number
