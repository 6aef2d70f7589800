"""Runs the CUDA kernels without a GPU: their source as C++ over an emulated device (``emulation``), against the core.

Under ASan + UBSan, so that an access outside a buffer or with a wrong alignment shows; with ``--full`` also with
optimization. ``tests/gpu`` holds what runs on a GPU.
"""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import emulated


@pytest.mark.timeout(1200)  # it waits for the compiler
@pytest.mark.parametrize("name", ["asan", pytest.param("plain", marks=pytest.mark.full)])
def test_kernels(name):
    """All suites under one build."""
    if shutil.which(emulated.native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{emulated.native.COMPILER}' is not in PATH")
    result = emulated.run(emulated.program(name, emulated.native.cache_folder()), [])
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"
