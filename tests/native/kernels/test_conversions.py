"""Runs ``conversions.cpp``: what the kernels get from a device's conversions, as NVIDIA's headers describe them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bagua.csrc import build_cuda

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import native_build as native  # noqa: E402


def test_conversions(tmp_path: Path) -> None:
    """Every suite of the program."""
    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        pytest.skip("no CUDA compiler (nvcc), with which NVIDIA's headers come; `deploy/dev.py test` brings one")
    program = tmp_path / "conversions"
    sources = [HERE / "conversions.cpp", native.HERE / "harness.cpp", *native.CORE.glob("base/*.cpp")]
    flags = ["-std=c++17", "-O2", "-cudart=none", "-Xcompiler=-pthread", *native.INCLUDES, f"-I{native.HERE}"]
    command = [nvcc.path, *flags, *(str(path) for path in sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}{result.stderr}"
