"""Metrics of the operator, and their page."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from bagua.operator.memory import Numbers
from bagua.operator.metrics import OperatorCollector

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_page_lists_all_metrics() -> None:
    numbers = Numbers()
    numbers.refusals["403"] = 2
    rows = []
    for one in OperatorCollector(numbers, lambda: Counter({"Running": 1})).collect():
        labels = ", ".join(f"`{label}`" for label in one.samples[0].labels)
        name = f"{one.name}_total" if one.type == "counter" else one.name
        rows.append(f"| `{name}` | {one.type} | {labels} | {one.documentation} |")
    text = PAGE.read_text()
    assert "\n".join(rows) in text, "docs/metrics.md needs these rows:\n" + "\n".join(rows)
    assert len(re.findall(r"^\| `bagua_operator_", text, re.MULTILINE)) == len(rows) - 1
