"""Runs the CUDA kernels without a GPU: their source as C++ over an emulated device (``emulation``), against the core.

Under ASan + UBSan, so that an access outside a buffer or with a wrong alignment shows; with ``--full`` also with
optimization. ``tests/gpu`` holds what runs on a GPU.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import emulated
from emulated import native


@pytest.mark.timeout(1200)  # it waits for the compiler
@pytest.mark.parametrize("name", ["asan", pytest.param("plain", marks=pytest.mark.full)])
def test_kernels(name):
    """All suites under one build. Every emulated thread has a stack: stacks kept after a return would be too many."""
    options = {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    native.check(name, lambda: emulated.program(name, native.cache_folder()), **options)
