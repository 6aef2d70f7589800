"""Every benchmark runs, tiny. Nothing is asserted about time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["allreduce", "train", "startup"])
def test_benchmark_runs(name: str) -> None:
    command = [sys.executable, str(HERE / f"{name}.py"), "--smoke", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert rows
    assert all(value > 0 for row in rows for value in row.values() if isinstance(value, float))
