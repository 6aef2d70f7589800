"""Runs the CUDA kernels without a GPU: their source as C++ over an emulated device (``emulation``), against the core.

Under ASan + UBSan, so that an access outside a buffer or with a wrong alignment shows; with ``--full`` also with
optimization, and at every number of elements up to 5000. ``tests/integration/cuda`` holds what runs on a GPU.

By hand: ``python tests/native/cuda/test_kernels_emulated.py [plain|asan] [suite[.test] ...]``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import test_native as native  # noqa: E402 (tests/native is no package)

EMULATION = HERE / "emulation"
# A product must not be merged with a sum that follows, as on the device; "#pragma unroll" is nvcc's.
FLAGS = [*native.COMMON, "-ffp-contract=off", "-Wno-unknown-pragmas"]
BUILDS = {name: native.BUILDS[name] for name in ("plain", "asan")}
SUITES = sorted(path.stem for path in HERE.glob("*_test.cpp"))
SWEEP = "sweep_kernels_test"


def sources() -> list[Path]:
    """The kernels, what they are compared with, the emulated device, the suites."""
    csrc = native.CSRC
    found = [*csrc.glob("cuda/*.cu"), *csrc.glob("codec/*.cpp"), *csrc.glob("kernel/*.cpp")]
    return [*sorted(found), EMULATION / "emulation.cpp", *sorted(HERE.glob("*_test.cpp")), HERE.parent / "harness.cpp"]


def build(name: str, folder: Path) -> Path:
    """Compiles and links one build of the test program; returns the program. Raises RuntimeError: messages."""
    flags = [*FLAGS, *BUILDS[name], f"-I{EMULATION}", f"-I{native.CSRC}", f"-I{HERE}", f"-I{HERE.parent}"]
    shared = [*EMULATION.iterdir(), HERE / "rig.h", *native.CSRC.glob("cuda/*.h")]

    def compile_unit(source: Path) -> Path:
        parts = [*native.with_headers(source), *shared]
        key = native.content_key(parts, native.compiler_version(), *flags, str(source))
        output = folder / f"cuda-{name}-{source.stem}-{key}.o"
        if not output.exists():
            native.run_compiler([*flags, "-x", "c++", "-c", str(source)], output)
        return output

    with native.locked(folder):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, sources()))
        program = folder / f"cuda-{name}-{native.content_key([], *(str(path) for path in objects))}.program"
        if not program.exists():
            native.run_compiler([*flags, *(str(path) for path in objects)], program)
    return program


def run(program: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests. Every emulated thread has a stack of its own: stacks kept after a return would be too many."""
    env = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(program), *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=280, check=False
    )


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.full if name == "plain" else ()) for name in BUILDS]
)
def emulated_build(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Name of the build and its program."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{native.COMPILER}' is not in PATH")
    cache = request.config.cache
    assert cache is not None
    name = str(request.param)
    return name, build(name, native.cache_folder(Path(cache.mkdir("native-tests"))))


@pytest.mark.timeout(600)  # the first suite of a build waits for the compiler
@pytest.mark.parametrize("suite", [pytest.param(s, marks=pytest.mark.full if s == SWEEP else ()) for s in SUITES])
def test_kernels(emulated_build: tuple[str, Path], suite: str) -> None:
    """One suite under one build."""
    result = run(emulated_build[1], [suite])
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"


def main(arguments: list[str]) -> int:
    """Builds and runs by hand, with the output on the screen."""
    name = arguments[0] if arguments else "plain"
    program = build(name, native.cache_folder(HERE.parents[2] / ".pytest_cache" / "d" / "native-tests"))
    result = run(program, arguments[1:])
    print(result.stdout, end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
