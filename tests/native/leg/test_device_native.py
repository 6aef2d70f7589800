"""Builds and runs the GPU leg's C++ and the fakes under ASan + UBSan and TSan (``--full``: a build takes a minute).

By hand: ``python tests/native/leg/test_device_native.py [plain|asan|tsan] [suite[.test] ...]``.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fakes  # noqa: E402
import native_build as native  # noqa: E402

SUPPRESSIONS = "leak:libfake_"  # their handles live for ever, so that a use after the end is seen


def sources(folder):
    """The core and the leg without their bindings, the harness, the suite."""
    leg = [unit for files in native.groups_of("gpu/leg") for unit in native.join(files, folder)]
    return [*native.core_sources(), *leg, HERE.parent / "harness.cpp", HERE / "leg_test.cpp"]


def run(name, folder, arguments):
    """Builds what is missing and runs tests; returns the exit status and the output."""
    libraries = fakes.build(folder, "" if name == "plain" else name)
    suppressions = folder / "leg-suppressions.txt"
    suppressions.write_text(SUPPRESSIONS)
    variables = fakes.environment(libraries) | {"LSAN_OPTIONS": f"suppressions={suppressions}:use_tls=0"}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        result = native.run(name, native.build(name, folder, sources(folder)), arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return result.returncode, result.stdout


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["asan", "tsan"])
def test_device_native(name):
    """Everything under one sanitizer."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{native.COMPILER}' is not in PATH")
    status, output = run(name, native.cache_folder(), [])
    assert status == 0, f"exit status {status}\n{output}"


def main(arguments):
    """Builds and runs by hand, with the output on the screen."""
    name = arguments[0] if arguments else "plain"
    folder = native.cache_folder()
    status, output = run(name, folder, arguments[1:])
    print(output, end="")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
