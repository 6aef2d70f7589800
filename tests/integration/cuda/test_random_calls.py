"""The GPU tests' random calls of the kernels (tests/gpu/kernels_random.py), over the kernels on an emulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS / "native" / "kernels"))
import emulated  # noqa: E402 (the folder is no package)


@pytest.mark.full
@pytest.mark.timeout(600)  # the compiler
def test_random_calls(tmp_path: Path) -> None:
    """Nothing is wrong, and something was called."""
    library = emulated.library(emulated.native.cache_folder())
    result = tmp_path / "found.json"
    command = [sys.executable, "-m", "gpu.kernels_random", "--device", "fake", "--seconds", "20", "--result", result]
    env = {**os.environ, "BAGUA_DEVICE_KERNELS": str(library), "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert [check["ok"] for check in found["checks"]] == [True]
    assert found["tables"]["random calls"][0]["calls"] > 1
