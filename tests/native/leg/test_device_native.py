"""Builds and runs the GPU leg's C++ and the fakes under ASan + UBSan and TSan (``--full``: a build takes a minute)."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fakes  # noqa: E402
import native_build as native  # noqa: E402


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["asan", "tsan"])
def test_device_native(tmp_path, name):
    """The core and the leg without their bindings, under one sanitizer."""
    folder = native.cache_folder()
    leg = [unit for files in native.groups_of("gpu/leg") for unit in native.join(files, folder)]
    units = [*native.core_sources(), *leg, HERE.parent / "harness.cpp", HERE / "leg_test.cpp"]
    # Handles of the fakes live for ever, so that a use after the end is seen.
    (tmp_path / "suppressions").write_text("leak:libfake_")
    leaks = {"LSAN_OPTIONS": f"suppressions={tmp_path}/suppressions:use_tls=0"}
    variables = fakes.environment(fakes.build(folder, name)) | leaks
    native.check(name, lambda: native.build(name, folder, units), **variables)
