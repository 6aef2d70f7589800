"""The program that measures checkpoints runs, and they are written while it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full  # no command of bagua's
def test_checkpoints(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("checkpoints.py"))
    options = ["--model", "tiny", "--steps", "2", "--rounds", "2", "--folder", str(tmp_path / "c"), "--output", "json"]
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert len(row["costs_s"]) == 2 and row["blocked_ms"] > 0 and row["cpu_s"] > 0
    assert [path.name.startswith("step_") for path in (tmp_path / "c").iterdir()] == [True]
