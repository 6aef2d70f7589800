"""The doctor on GPUs, with drivers and NCCL that are small libraries made here."""

import subprocess

import pytest

from bagua.cli.checks import gpu_checks
from bagua.cli.checks.gpu_checks import Probe
from bagua.cli.checks.machine import WARN

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
def library(tmp_path, monkeypatch):
    """Compiles a library that the probe's process finds by name."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    def make(name, source, *flags):
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", *flags, "-o", str(tmp_path / name)]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        return tmp_path / name

    return make


def test_driver_and_nccl_are_asked(library, monkeypatch):
    library("libcuda.so.1", DRIVER, "-DFAILS=0")
    nccl = library("libnccl.so.2", NCCL)
    monkeypatch.setattr(gpu_checks, "_nccl_libraries", lambda: ["/no/such/file", str(nccl)])
    assert gpu_checks.probe() == Probe("13.2", ["Card A", "Card B"], [[8, 6], [9, 6]], "2.28.9", str(nccl))


def test_driver_without_a_card(library, monkeypatch):
    library("libcuda.so.1", DRIVER, "-DFAILS=100")
    monkeypatch.setattr(gpu_checks, "_nccl_libraries", lambda: [])
    found = gpu_checks.probe()
    assert (found.driver, found.gpus, found.problem) == ("13.2", [], "the driver answers with error 100")
    lines = {line.name: line for line in gpu_checks.findings()}
    assert (lines["GPU"].status, lines["NCCL"].status) == (WARN, WARN)
    assert all(line.fix for line in lines.values() if line.status == WARN)


def test_driver_that_crashes_or_hangs(library, monkeypatch):
    library("libcuda.so.1", "#include <stdlib.h>\nint cuDriverGetVersion(int* v) { abort(); }")
    assert "ended the process" in gpu_checks.probe().problem
    library("libcuda.so.1", "#include <unistd.h>\nint cuDriverGetVersion(int* v) { pause(); return 0; }")
    monkeypatch.setattr(gpu_checks, "PROBE_DEADLINE_S", 1.0)
    assert "did not answer" in gpu_checks.probe().problem
