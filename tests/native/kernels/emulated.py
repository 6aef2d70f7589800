"""Builds the CUDA kernels as C++ over an emulated device (``emulation``): a test program, and a library for the CPU."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import native_build as native  # noqa: E402

EMULATION = HERE / "emulation"
# A product must not be merged with a sum that follows, as on the device; "#pragma unroll" is nvcc's; that a loop over
# inputs has a first round is not seen by gcc.
FLAGS = ["-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
FLAGS += [f"-I{EMULATION}", f"-I{HERE}"]
KERNELS = [*sorted(native.CSRC.glob("gpu/kernels/*.cu")), EMULATION / "emulation.cpp"]


def program(name, folder):
    """The test program of one build: the kernels, what they are compared with, the suites. Raises RuntimeError."""
    core = sorted([*native.CORE.glob("codec/*.cpp"), *native.CORE.glob("kernel/*.cpp")])
    suites = [*sorted(HERE.glob("*_test.cpp")), HERE.parent / "harness.cpp"]
    return native.build(name, folder, [*KERNELS, *core, *suites], *FLAGS)


def library(folder):
    """libbagua_kernels.so for memory of the CPU; its calls return when their work is done. Raises RuntimeError."""
    return native.build("plain", folder, KERNELS, *FLAGS, link=["-shared"])
