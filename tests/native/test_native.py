"""Builds and runs the native tests of the core: plain, under ASan + UBSan, and under TSan.

Every ``*_test.cpp`` in this folder is a suite; it is linked with ``harness.cpp`` and all sources of ``csrc/core`` but
the bindings (they need Python). To add tests, add a file. ``native_build.py`` is the builder.

By hand: ``python tests/native/test_native.py [plain|asan|tsan] [suite[.test] ...]``.
"""

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import native_build as native  # noqa: E402

SUITES = sorted(path.stem for path in HERE.glob("*_test.cpp"))


def build(name: str, folder: Path) -> Path:
    """The test program: the core, the harness, the suites."""
    return native.build(name, folder, [*native.core_sources(), *sorted(HERE.glob("*.cpp"))])


# The plain build is the core that all other tests run; the suites run in it with --full.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.full if name == "plain" else ()) for name in native.BUILDS],
)
def native_build(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Name of the build and its program."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{native.COMPILER}' is not in PATH")
    name = str(request.param)
    cache = request.config.cache
    assert cache is not None
    return name, build(name, native.cache_folder(Path(cache.mkdir("native-tests"))))


@pytest.mark.timeout(600)  # the first suite of a build waits for the compiler
@pytest.mark.parametrize("suite", SUITES)
def test_native(native_build: tuple[str, Path], suite: str) -> None:
    """One suite under one build."""
    name, program = native_build
    result = native.run(name, program, [suite])
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"


def main(arguments: list[str]) -> int:
    """Builds and runs by hand, with the output on the screen."""
    name = arguments[0] if arguments else "plain"
    program = build(name, native.cache_folder(HERE.parents[1] / ".pytest_cache" / "d" / "native-tests"))
    result = native.run(name, program, arguments[1:])
    print(result.stdout, end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
