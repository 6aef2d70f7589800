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


def train_entry(system: str, kind: str, seconds: float) -> dict[str, object]:
    return {
        **{"system": system, "kind": kind, "parameters": 1000, "s": seconds},
        **{"exposed_s": None, "hidden_s": 0.002, "sent_bytes": 4e6},
    }


def test_rows_of_train() -> None:
    found = [
        train_entry("alone", "alone", 0.1),
        train_entry("ddp", "ddp", 0.4),
        train_entry("ddp fp16", "ddp", 0.3),
        train_entry("bagua", "bagua", 0.2),
    ]
    alone, ddp, fp16, ours = report.train_rows(found, "1gbit", "mlp", "ddp", "alone")
    assert ours["times_ddp"] == pytest.approx(2.0)
    assert ours["times_best_ddp"] == pytest.approx(1.5)
    assert ours["over_alone"] == pytest.approx(2.0)
    assert ours["hidden_ms"] == pytest.approx(2.0)
    assert ours["exposed_ms"] is None
    assert ours["sent_mb"] == pytest.approx(4.0)
    assert fp16["times_ddp"] == pytest.approx(4 / 3)
    assert (alone["over_alone"], ddp["times_ddp"], ddp["times_best_ddp"]) == (None, None, None)


def test_rows_of_train_without_peers() -> None:
    (ours,) = report.train_rows([train_entry("bagua", "bagua", 0.2)], None, "mlp", "ddp", "alone")
    assert (ours["times_ddp"], ours["times_best_ddp"], ours["over_alone"]) == (None, None, None)


def test_rows_of_codecs() -> None:
    seconds = {f"{step}_s": 1e-3 for step in ("encode", "decode_add", "recode")}
    entry = {
        "codec": "fp16",
        "bytes": 4_000_000,
        "message_bytes": 2_000_000,
        "error": 1e-4,
        "memcpy_s": 5e-4,
        **seconds,
    }
    (row,) = report.codec_rows([entry])
    assert row["ratio"] == 2
    assert row["encode"] == pytest.approx(4.0)
    assert row["memcpy"] == pytest.approx(8.0)


def test_rows_of_a_network_become_a_matrix() -> None:
    found = [
        {"source": 0, "target": 1, "bits_per_s": 1e9, "latency_s": 5e-5},
        {"source": 1, "target": 0, "bits_per_s": 2e9, "latency_s": 6e-5},
    ]
    rows = report.network_rows(found, None, {0: "a", 1: "b"})
    headings, cells = report.matrix(rows)
    assert headings[1:] == ["a", "b"]
    assert cells == [["a", "", "1 / 50"], ["b", "2 / 60", ""]]
