"""The programs beside it run, and everything that they compare is fused."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_fused_steps() -> None:
    spec = importlib.util.spec_from_file_location("fused_steps", Path(__file__).with_name("fused_steps.py"))
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    rows = program.measure(tensors=5, elements=7, steps=2)
    assert {row["optimizer"] for row in rows} == set(program.kinds()) and len(rows) == 8
    assert all(row["fused"] == 5 and row["times as fast as loop"] > 0 for row in rows)


@pytest.mark.full  # no command of bagua's
def test_backward_steps() -> None:
    program = str(Path(__file__).with_name("backward_steps.py"))
    options = ["--model", "tiny", "--network", "none", "--steps", "2", "--warm-up", "2", "--output", "json"]
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4
