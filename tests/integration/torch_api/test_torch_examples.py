"""The examples, on forked ranks. tests/e2e/test_examples.py runs the README's by ``bagua run``."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def rank_example(name: str, arguments: list[str]) -> int | None:
    """The exit code of an example."""
    sys.argv = [name, *arguments]
    code: int | None = importlib.import_module(f"bagua.examples.{name}").main()
    return code


def run_example(ranks: Any, name: str, *arguments: str) -> tuple[list[int | None], str]:
    """(exit codes of two ranks, output of the first one)."""
    codes = ranks.run(rank_example, 2, name=name, arguments=list(arguments))
    return codes, ranks.started[0].output


def test_charlm_learns(ranks: Any) -> None:
    codes, output = run_example(ranks, "charlm", "--steps", "12", "--sample", "40", "--batch-size", "8")
    assert codes == [0, 0], output
    table = dict(line.split("  ", 1) for line in output.splitlines() if "  " in line)
    assert float(table["held-out loss after"]) < float(table["held-out loss before"])
    assert "The model writes:" in output


def test_digits_as_json(ranks: Any) -> None:
    codes, output = run_example(ranks, "digits", "--epochs", "1", "--output", "json")
    assert codes == [1, 1] and "below 97%" in output, output  # one epoch is too little, and the job says so
    outcome = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert outcome["replicas_identical"] is True
    assert outcome["bytes_inside_hosts"] > 0
    assert outcome["bytes_between_hosts"] == 0
    assert 0 <= outcome["hidden_share"] <= 1


def test_moe(ranks: Any, tmp_path: Path) -> None:
    options = ("--num-local-experts", "2", "--k", "2", "--epochs", "1", "--save-model", str(tmp_path / "saved"))
    codes, output = run_example(ranks, "moe", *options, "--output", "json")
    assert codes == [1, 1] and "below 95%" in output, output  # one epoch is too little, and the job says so
    assert json.loads(next(line for line in output.splitlines() if line.startswith("{")))["replicas_identical"] is True
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "23"


def test_announcement(ranks: Any) -> None:
    codes, output = run_example(ranks, "announcement")
    assert codes == [None, None]
    assert [one.output.count("of 2 (local") for one in ranks.started] == [1, 1], output


def test_own_algorithm(ranks: Any) -> None:
    codes, output = run_example(ranks, "own_algorithm")
    assert codes == [0, 0], output
    assert "NormalisedMean       held-out loss 0.0" in output
