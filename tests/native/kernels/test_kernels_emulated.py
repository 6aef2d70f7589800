"""Runs the CUDA kernels without a GPU: their source as C++ over an emulated device (``emulation``), against the core.

Under ASan + UBSan, so that an access outside a buffer or with a wrong alignment shows; with ``--full`` also with
optimization, and at every number of elements up to 5000. ``tests/gpu`` holds what runs on a GPU.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import emulated

SWEEP = "sweep_kernels_test"


def build(name: str, full: bool) -> Path:
    """The program of one build."""
    suites = [suite for suite in emulated.SUITES if suite != SWEEP or full]
    return emulated.program(name, emulated.native.cache_folder(), suites)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.full if name == "plain" else ()) for name in emulated.BUILDS],
)
def built(request: pytest.FixtureRequest) -> Path:
    """The program of one build."""
    compiler = emulated.native.COMPILER
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: '{compiler}' is not in PATH")
    return build(str(request.param), request.config.getoption("--full"))


@pytest.mark.timeout(1200)  # the first suite of a build waits for the compiler
@pytest.mark.parametrize(
    "suite", [pytest.param(suite, marks=pytest.mark.full if suite == SWEEP else ()) for suite in emulated.SUITES]
)
def test_kernels(built: Path, suite: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One suite under one build."""
    if request.config.getoption("--full"):
        monkeypatch.setenv("BAGUA_TEST_FULL", "1")
    result = emulated.run(built, [suite])
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"
