"""The doctor on GPUs, with drivers and NCCL that are small libraries made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bagua.cli.checks import gpu_checks
from bagua.cli.checks.gpu_checks import Probe
from bagua.cli.checks.machine import OK, WARN
from bagua.csrc import BuildError, build_cuda

DRIVER = """
#include <string.h>
int cuDriverGetVersion(int* v) { *v = 13020; return 0; }
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strncpy(name, device ? "Card B" : "Card A", size); return 0; }
int cuDeviceGetAttribute(int* v, int attribute, int device) { *v = attribute == 75 ? 8 + device : 6; return 0; }
"""
NCCL = "int ncclGetVersion(int* v) { *v = 22809; return 0; }"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiles a library that the probe's process finds by name."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    def make(name: str, source: str, *flags: str) -> Path:
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", *flags, "-o", str(tmp_path / name)]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        return tmp_path / name

    return make


def test_driver_and_nccl_are_asked(library, monkeypatch: pytest.MonkeyPatch) -> None:
    library("libcuda.so.1", DRIVER, "-DFAILS=0")
    nccl = library("libnccl.so.2", NCCL)
    monkeypatch.setattr(gpu_checks, "_nccl_libraries", lambda: ["/no/such/file", str(nccl)])
    assert gpu_checks.probe() == Probe("13.2", ["Card A", "Card B"], [[8, 6], [9, 6]], "2.28.9", str(nccl))


def test_driver_without_a_card(library, monkeypatch: pytest.MonkeyPatch) -> None:
    library("libcuda.so.1", DRIVER, "-DFAILS=100")
    monkeypatch.setattr(gpu_checks, "_nccl_libraries", lambda: [])
    found = gpu_checks.probe()
    assert (found.driver, found.gpus, found.problem) == ("13.2", [], "the driver answers with error 100")
    lines = {line.name: line for line in gpu_checks.findings()}
    assert (lines["GPU"].status, lines["NCCL"].status) == (WARN, WARN)
    assert all(line.fix for line in lines.values() if line.status == WARN)


def test_driver_that_crashes_or_hangs(library, monkeypatch: pytest.MonkeyPatch) -> None:
    library("libcuda.so.1", "#include <stdlib.h>\nint cuDriverGetVersion(int* v) { abort(); }")
    assert "ended the process" in gpu_checks.probe().problem
    library("libcuda.so.1", "#include <unistd.h>\nint cuDriverGetVersion(int* v) { pause(); return 0; }")
    monkeypatch.setattr(gpu_checks, "PROBE_DEADLINE_S", 1.0)
    assert "did not answer" in gpu_checks.probe().problem


@pytest.mark.parametrize("nvcc", [None, build_cuda.Nvcc("/x/bin/nvcc", "13.0", Path("/x"))])
def test_no_gpu_is_one_line(nvcc: build_cuda.Nvcc | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "probe", Probe)
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: nvcc)
    (line,) = gpu_checks.findings()
    assert (line.name, line.status) == ("GPU", OK)
    assert "CPU" in line.detail and ("nvcc 13.0" if nvcc else "no nvcc") in line.detail


def test_gpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> Path:
        raise BuildError("No CUDA compiler (nvcc): install it.")

    monkeypatch.setenv("BAGUA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_checks, "probe", lambda: Probe("13.0", ["Card"], [[9, 0]], "2.28.9", "/nccl"))
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: None)
    monkeypatch.setattr(build_cuda, "kernels_built", missing)
    lines = {line.name: line for line in gpu_checks.findings()}
    assert [lines[name].status for name in ("GPU", "NCCL", "nvcc", "GPU kernels")] == [OK, OK, WARN, WARN]
    assert "install it" in lines["GPU kernels"].fix
    assert lines["Bagua-Net"].detail == lines["GPU leg"].detail == "not built yet"


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (Probe("13.0", ["Tesla T4"], [[7, 5]]), OK, "this is 7.5: codecs run in the daemons"),
        (Probe("12.4", ["A100"], [[8, 0]]), WARN, "nvcc 13.0 is newer than the driver's CUDA 12.4"),
    ],
)
def test_kernels_that_can_not_run(monkeypatch: pytest.MonkeyPatch, found: Probe, status: str, words: str) -> None:
    monkeypatch.setattr(gpu_checks, "probe", lambda: found)
    monkeypatch.setattr(build_cuda, "find_nvcc", lambda: build_cuda.Nvcc("/x/bin/nvcc", "13.0", Path("/x")))
    (line,) = [line for line in gpu_checks.findings() if line.name == "GPU kernels"]
    assert line.status == status and words in line.detail
    assert bool(line.fix) == (status == WARN)
