"""Checks with Clang that guarded members are used with their mutex locked (csrc/core/base/thread_annotations.h)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import native_build as native
from rig.programs import missing

TIDY = shutil.which("clang-tidy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
"""Clang's parser, from a package of Python: a machine needs no compiler besides g++."""
# Clang's findings about locks, none of the checks of clang-tidy.
CHECKS = [
    "--allow-no-checks",
    "--checks=-*,clang-diagnostic-error,clang-diagnostic-thread-safety*",
    "--warnings-as-errors=*",
    "--quiet",
]
FLAGS = ["-std=c++17", "-Wthread-safety", *native.INCLUDES]


def units():
    """Files to parse at once."""
    found = {f"core/{folder.name}": sorted(folder.rglob("*.cpp")) for folder in sorted(native.CORE.iterdir())}
    found.pop("core/bindings")
    found |= {
        f"{folder} {number}": files for folder in native.APART for number, files in enumerate(native.groups_of(folder))
    }
    return {name: files for name, files in found.items() if any(_locks(path) for path in files)}


def _locks(path):
    return native.CORE / "base" / "mutex.h" in native.with_headers(path)


@pytest.mark.parametrize(("name", "files"), units().items(), ids=units().keys())
def test_guarded_members_are_used_under_their_mutex(name, files, tmp_path):
    """Each unit compiles with Clang, without a finding."""
    if TIDY is None:
        missing("no clang-tidy (pip install clang-tidy)")
    joined = tmp_path / "joined.cpp"
    joined.write_text("".join(f'#include "{path}"\n' for path in files))
    command = [TIDY, *CHECKS, str(joined), "--", *FLAGS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout


def test_mutexes_are_those_that_clang_knows():
    """std::mutex has no attributes here: what it guards would not be checked."""
    plain = re.compile(r"std::(recursive_|shared_)?mutex\b|std::condition_variable\b")
    home = native.CORE / "base" / "mutex.h"
    paths = [path for path in native.CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu") and path != home]
    found = [str(path.relative_to(native.CSRC)) for path in sorted(paths) if plain.search(path.read_text())]
    assert [path for path in found if not path.startswith("tools/")] == []
