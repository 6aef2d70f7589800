"""Metrics as declarations: what a service may show to Prometheus, and families made of it at a scrape.

A test compares the tables of ``docs/metrics.md`` with the declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import bagua


@dataclass(frozen=True)
class Family:
    """One metric. ``name``: in Prometheus's conventions, with its unit; that of a counter ends with ``_total``."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """``counter`` or ``gauge``."""
        return "counter" if self.name.endswith("_total") else "gauge"

    def single(self, value: float) -> Metric:
        """The family of a metric without labels."""
        return self.of({(): value})

    def of(self, values: Mapping[Any, float]) -> Metric:
        """The family with a value for each tuple of labels."""
        made: CounterMetricFamily | GaugeMetricFamily
        if self.kind == "counter":
            # The library adds "_total" to each sample.
            made = CounterMetricFamily(self.name.removesuffix("_total"), self.help, labels=self.labels)
        else:
            made = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            made.add_metric(list(labels), value)
        return made


BUILD_INFO = Family("bagua_build_info", "Version of the program that is scraped; the value is 1.", ("version",))


def build_info() -> Metric:
    """The version that runs."""
    return BUILD_INFO.of({(bagua.__version__,): 1.0})


def table(families: Iterable[Family]) -> str:
    """A table in Markdown."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows) + "\n"
