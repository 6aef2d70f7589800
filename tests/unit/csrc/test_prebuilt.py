"""Modules that were compiled elsewhere: taken where they fit sources, Python and processor, else ignored."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.csrc import build, prebuilt

PROGRAM = """
import sys, bagua.csrc
print(bagua.csrc.core_path())
print(len(bagua.csrc.load().KINDS), "torch" in sys.modules)
"""
V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages with ``bagua_prebuilt``, whose core is this machine's."""
    monkeypatch.delenv("BAGUA_CORE_MARCH", raising=False)
    folder = tmp_path / "packages" / prebuilt.PACKAGE
    folder.mkdir(parents=True)
    shutil.copy(build.build(), folder / "core.so")
    (folder / "__init__.py").touch()
    offer(folder, build.prebuilt_key())
    return folder.parent


def offer(folder, key):
    levels = [level for all_levels in prebuilt.LEVELS.values() for level in all_levels]
    made = [{"kind": "core", "level": level, "key": key, "file": "core.so"} for level in levels]
    (folder / prebuilt.LIST).write_text(json.dumps(made))


def run(program, packages, **environment):
    """Lines that a program prints which finds the package."""
    full = {**os.environ, "PYTHONPATH": str(packages), **environment}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=full, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_core_that_fits_needs_no_compiler_no_torch_and_no_cache(packages, tmp_path):
    nothing = tmp_path / "nothing"
    path, loaded = run(PROGRAM, packages, BAGUA_CACHE_DIR=str(nothing), PATH=str(nothing))
    assert Path(path) == packages / prebuilt.PACKAGE / "core.so"
    assert loaded == f"{len(build.load().KINDS)} False"
    assert not nothing.exists()


@pytest.mark.parametrize("what", ["other sources", "no file", "damaged list", "compiled on request"])
def test_what_does_not_fit_is_ignored(what, packages, tmp_path):
    folder = packages / prebuilt.PACKAGE
    environment = {"BAGUA_CACHE_DIR": str(tmp_path / "cache")}
    match what:
        case "other sources":
            offer(folder, "other")
        case "no file":
            (folder / "core.so").unlink()
        case "damaged list":
            (folder / prebuilt.LIST).write_text("[{}")
        case "compiled on request":
            environment["BAGUA_CORE_MARCH"] = "native"
    (path,) = run("import bagua.csrc; print(bagua.csrc.core_path())", packages, **environment)
    assert Path(path).is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize(
    ("machine", "flags", "fit"),
    [
        ("x86_64", "pni", []),
        ("x86_64", V2, ["x86-64-v2"]),
        ("x86_64", f"{V3} avx512f", ["x86-64-v3", "x86-64-v2"]),
        ("x86_64", V3.replace("popcnt", ""), []),
        ("aarch64", "", ["armv8-a"]),
        ("riscv64", "", []),
    ],
)
def test_the_best_level_comes_first(machine, flags, fit):
    assert prebuilt.levels(machine, frozenset(flags.split())) == fit


def test_what_sees_torch_fits_one_version_of_it(monkeypatch):
    def keys(version):
        monkeypatch.setattr(build, "torch_version", lambda: version)
        return build.prebuilt_key(build.C10D), build.prebuilt_key()

    (mine, core), (same, same_core), (other, other_core) = map(keys, ("2.13.0", "2.13.0+cpu", "2.13.1"))
    assert mine == same != other and core == same_core == other_core
    monkeypatch.setattr(build, "_of_torch", lambda _: b"")  # the older std::string
    assert build.prebuilt_key(build.C10D) != other
