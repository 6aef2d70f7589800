"""Builds the CUDA kernels as C++ over an emulated device (``emulation``): a test program, and a library for the CPU.

By hand: ``python tests/native/kernels/emulated.py [plain|asan] [suite[.test] ...]``.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import native_build as native  # noqa: E402

EMULATION = HERE / "emulation"
# A product must not be merged with a sum that follows, as on the device; "#pragma unroll" is nvcc's; that a loop over
# inputs has a first round is not seen by gcc.
FLAGS = [*native.COMMON, "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]
BUILDS = {name: native.BUILDS[name] for name in ("plain", "asan")}
DEADLINE_S = 900


def _flags(name):
    return [*FLAGS, *BUILDS[name], f"-I{EMULATION}", *native.INCLUDES, f"-I{HERE}", f"-I{HERE.parent}"]


def _compiled(name, folder, sources):
    """Objects of the sources, compiled where they are not in the folder. Raises RuntimeError: the messages."""
    flags = _flags(name)
    shared = [*EMULATION.glob("*.h"), HERE / "rig.h", *native.CSRC.glob("gpu/kernels/*.h")]

    def compile_unit(source):
        key = native.content_key(
            [*native.with_headers(source), *shared], native.compiler_version(), *flags, str(source)
        )
        output = folder / f"cuda-{name}-{source.stem}-{key}.o"
        if not output.exists():
            native.run_compiler([*flags, "-x", "c++", "-c", str(source)], output)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_unit, sources))


def _linked(name, folder, objects, suffix, *more):
    result = folder / f"cuda-{name}-{native.content_key([], *(str(path) for path in objects))}.{suffix}"
    if not result.exists():
        native.run_compiler([*_flags(name), *more, *(str(path) for path in objects)], result)
    return result


def _kernels():
    return [*sorted(native.CSRC.glob("gpu/kernels/*.cu")), EMULATION / "emulation.cpp"]


def program(name, folder):
    """The test program of one build: the kernels, what they are compared with, the suites. Raises RuntimeError."""
    core = [*native.CORE.glob("codec/*.cpp"), *native.CORE.glob("kernel/*.cpp")]
    with native.locked(folder, f"cuda-{name}"):
        suites = [*sorted(HERE.glob("*_test.cpp")), HERE.parent / "harness.cpp"]
        return _linked(name, folder, _compiled(name, folder, [*_kernels(), *sorted(core), *suites]), "program")


def library(folder):
    """libbagua_kernels.so for memory of the CPU; its calls return when their work is done. Raises RuntimeError."""
    with native.locked(folder, "cuda-plain"):
        return _linked("plain", folder, _compiled("plain", folder, _kernels()), "so", "-shared")


def run(built, arguments):
    """Runs tests. Every emulated thread has a stack of its own: stacks kept after a return would be too many."""
    env = os.environ | {"ASAN_OPTIONS": "detect_stack_use_after_return=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(built), *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=DEADLINE_S, check=False
    )


def main(arguments):
    """Builds and runs by hand, with the output on the screen."""
    name = arguments[0] if arguments else "plain"
    built = program(name, native.cache_folder())
    result = run(built, arguments[1:])
    print(result.stdout, end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
