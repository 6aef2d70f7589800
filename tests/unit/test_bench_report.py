"""Rows, cells and files of reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.base.errors import ConfigError
from bagua.bench import report

FOUND = [
    {"system": "bagua", "bytes": 1 << 20, "s": 0.001, "floor_s": 0.0005},
    {"system": "gloo", "bytes": 1 << 20, "s": 0.004, "floor_s": 0.0},
]


def test_rows_of_allreduce() -> None:
    ours, theirs = report.allreduce_rows(FOUND, "1gbit", 4, "gloo")
    assert ours["ms"] == pytest.approx(1.0)
    assert ours["algbw"] == pytest.approx(1.048576)
    assert ours["busbw"] == pytest.approx(1.048576 * 1.5)
    assert ours["times_peer"] == pytest.approx(4.0)
    assert ours["floor_share"] == pytest.approx(0.5)
    assert theirs["times_peer"] is None
    assert theirs["floor_ms"] is None


def test_columns_without_figures_are_left_out() -> None:
    rows = report.allreduce_rows(FOUND, None, 2, "")
    shown = report.present(rows, report.ALLREDUCE)
    assert "network" not in [column.key for column in shown]
    assert "times_peer" not in [column.key for column in shown]
    table = report.cells(rows, shown)
    assert table[0][:3] == ["1 MiB", "bagua", "1"]
    assert table[1][-2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (123.4, "123"), (12.345, "12.3"), (0.00123456, "0.00123"), (0, "0")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert report.number(value) == text


def test_document_is_saved(tmp_path: Path) -> None:
    made = report.document(
        "allreduce", "bagua bench allreduce", {"nnodes": 1}, report.allreduce_rows(FOUND, None, 2, "")
    )
    path = tmp_path / "out.json"
    report.save(made, path)
    read = json.loads(path.read_text())
    assert read["rows"] == made["rows"]
    assert read["machine"]["cores"] >= 1
    with pytest.raises(ConfigError, match="--save"):
        report.save(made, tmp_path / "no" / "out.json")
