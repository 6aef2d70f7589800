"""Builds and runs the native tests of the network plugin: plain, under ASan + UBSan, and under TSan.

They call the plugin's tables as NCCL does, both ends in one process, on loopback. By hand:
``python tests/native/nccl_net/test_nccl_net_native.py [plain|asan|tsan] [suite[.test] ...]``.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build as native  # noqa: E402

SUITES = sorted(path.stem for path in HERE.glob("*_test.cpp"))


def sources(folder: Path) -> list[Path]:
    """The plugin, what it is linked with, the harness, the suites; in as few units as names without linkage allow."""
    core: Path = native.CORE
    base = [core / "base" / f"{name}.cpp" for name in ("fd", "random", "scarcity", "sha256", "text")]
    return [
        *(unit for files in native.groups_of("nccl_net") for unit in native.join(files, folder)),
        *native.join(sorted(HERE.glob("*.cpp")), folder),
        *sorted((core / "net").glob("*.cpp")),
        *native.join([*base, core / "transport" / "stream_count.cpp", HERE.parent / "harness.cpp"], folder),
    ]


def build(name: str, folder: Path, full: bool = True) -> Path:
    """Compiles and links one build of the test program; returns the program.

    Raises:
        RuntimeError: the compiler's messages.
    """
    lean = [] if full else native.LEAN[name]
    flags = [*native.COMMON, *native.BUILDS[name], *lean, *native.INCLUDES, f"-I{HERE.parent}", f"-I{HERE}"]

    def compile_unit(source: Path) -> Path:
        headers = [*sorted((native.CSRC / "nccl_net").glob("*.h")), *sorted(HERE.glob("*.h"))]
        key = native.content_key(
            [*native.with_headers(source), *headers], native.compiler_version(), *flags, str(source)
        )
        output = folder / f"nccl-net-{name}-{source.stem}-{key}.o"
        if not output.exists():
            native.run_compiler([*flags, "-c", str(source)], output)
        return output

    with native.locked(folder, f"nccl-net-{name}"):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, sources(folder)))
        key = native.content_key([], *(str(path) for path in objects))
        program = folder / f"nccl-net-{name}-{key}.program"
        if not program.exists():
            native.run_compiler([*flags, *(str(path) for path in objects)], program)
    return program


def suites(name: str, helpers: str) -> list[str]:
    """All with helper threads, what moves large messages without them. spread_test, which waits for the network for
    seconds, is run once in each build: with them where TSan looks for races."""
    chosen = {"transfer_test", "fault_test"} if helpers == "0" else set(SUITES)
    chosen.discard("spread_test")
    if (helpers != "0") == (name == "tsan"):
        chosen.add("spread_test")
    return sorted(chosen)


# Helpers join in wherever the machine has two cores or twenty.
def run(name: str, program: Path, arguments: list[str], helpers: str) -> "subprocess.CompletedProcess[str]":
    """Runs suites with so many helper threads."""
    os.environ["BAGUA_NET_THREADS"] = helpers
    try:
        result: subprocess.CompletedProcess[str] = native.run(name, program, arguments)
    finally:
        del os.environ["BAGUA_NET_THREADS"]
    return result


# ASan runs in every test run; TSan, and the plain build, which other tests drive through ctypes, with --full.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "asan" else pytest.mark.full) for name in ("plain", "asan", "tsan")],
)
def program(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Name of the build and its program."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{native.COMPILER}' is not in PATH")
    name = str(request.param)
    return name, build(name, native.cache_folder(), request.config.getoption("--full"))


@pytest.mark.timeout(600)  # the first one of a build waits for the compiler
@pytest.mark.parametrize("helpers", ["0", "2"])
def test_nccl_net_native(program: tuple[str, Path], helpers: str) -> None:
    """All suites under one build, without helper threads and with them."""
    name, path = program
    result = run(name, path, suites(name, helpers), helpers)
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"


def main(arguments: list[str]) -> int:
    """Builds and runs by hand, with the output on the screen."""
    name = arguments[0] if arguments else "plain"
    path = build(name, native.cache_folder())
    result = run(name, path, arguments[1:], os.environ.get("BAGUA_NET_THREADS", "2"))
    print(result.stdout, end="")
    return int(result.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
