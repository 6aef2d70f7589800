"""The program that checks the kernels on a GPU: what of it can be known without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "native" / "cuda")]
import emulated  # noqa: E402 (neither folder is a package)
import kernels_check  # noqa: E402


def test_options() -> None:
    """Everything has a default but the size of what is measured."""
    given = kernels_check.options([])
    assert (given.library, given.device, given.seed, given.elements) == (None, "cuda", 0, 0)
    given = kernels_check.options(["--device", "cpu", "--seconds", "0.5", "--elements", "1024", "--seed", "7"])
    assert (given.device, given.seconds, given.elements, given.seed) == ("cpu", 0.5, 1024, 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, and builds nothing."""
    assert kernels_check.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(600)  # the compiler
def test_rehearsal(pytestconfig: pytest.Config) -> None:
    """All of it on the emulated device: nothing is wrong, everything is timed."""
    cache = pytestconfig.cache
    assert cache is not None
    library = emulated.library(emulated.native.cache_folder(Path(cache.mkdir("native-tests"))))
    command = [sys.executable, HERE / "kernels_check.py", "--device", "cpu", "--library", library]
    command += ["--seconds", "5", "--elements", "20000"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["random"]["calls"] > 1
    assert {"topk encode", "onebit decode", "sum of 8 bfloat16"} <= {row["what"] for row in report["bandwidth"]}
