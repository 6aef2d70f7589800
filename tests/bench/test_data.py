"""The program behind the figures of docs/data.md runs (--full)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 300.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "rows"), [("idle --samples 96 --turns 1", 5), ("cache --samples 5", 6), ("samplers --samples 1000", 3)]
)
def test_it_runs(what: str, rows: int) -> None:
    program = [sys.executable, "-P", str(Path(__file__).with_name("data.py")), *what.split(), "--output", "json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)) == rows
