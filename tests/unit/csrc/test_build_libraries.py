"""The libraries beside the core: the network plugin (g++ alone), and the CUDA kernels (nvcc: mostly a small stand-in).

Tiny sources, the real locking, keys and commands.
"""

import os
import re
import stat
from pathlib import Path

import pytest

from bagua.csrc import build, build_cache, build_cuda, build_plugin

INCLUDE = re.compile(r'^#include "([^"]+/[^"]+)"', re.MULTILINE)
# Answers as nvcc does; "compiles" by noting its arguments in the file that it is told to write.
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 12.4, V12.4.131"; exit 0;;
  --list-gpu-arch) printf 'compute_80\\ncompute_90\\n'; exit 0;;
esac
echo "$@" >> "$(dirname "$0")/calls"
case "$*" in *broken.cu*) echo "broken.cu(1): error: expected a ;"; exit 2;; esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A tree of sources with one file for each library."""
    root = tmp_path / "csrc"
    for folder in (build_cuda.KERNELS, "nccl_net", "core/base"):
        (root / folder).mkdir(parents=True)
    (root / build_cuda.KERNELS / "a.cu").write_text(
        '#define SEEN __attribute__((visibility("default")))\n'
        'extern "C" SEEN int answer() { nothing<<<1, 1>>>(); (void)cudaGetLastError(); return 42; }\n'
        "  nothing<<<1, 1>>>();\n  (void)cudaGetLastError();\n  return 42;\n}\n"
    )
    (root / "nccl_net" / "a.cpp").write_text(
        '#include "base/a.h"\n'
        'extern "C" __attribute__((visibility("default"))) int ncclNetPlugin_v0() { return inner(); }\n'
    )
    (root / "core/base" / "a.h").write_text("int inner();\n")
    (root / "core/base" / "a.cpp").write_text("int inner() { return 42; }\n")  # the same name as the plugin's
    monkeypatch.setattr(build_cuda, "SOURCE_DIR", root)
    monkeypatch.setattr(build_plugin, "SOURCE_DIR", root)
    return root


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A stand-in for nvcc 12.4 as CUDA_HOME; returns the file of its calls."""
    script = tmp_path / "toolkit" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(NVCC)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(script.parent.parent))
    for variable in ("BAGUA_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CXX", *build_cuda.NVCC_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    return script.parent / "calls"


def test_kernels_are_compiled_each_then_linked(sources, tmp_path, nvcc):
    (sources / build_cuda.KERNELS / "inner").mkdir()
    (sources / build_cuda.KERNELS / "inner" / "a.cu").write_text("int b;\n")
    library = build_cuda.kernels_library(tmp_path / "cache")
    assert library == build_cuda.kernels_built(tmp_path / "cache")
    assert library.name == "libbagua_kernels.so"
    calls = nvcc.read_text().splitlines()
    assert len(calls) == 3
    for call in calls[:2]:
        assert "-gencode=arch=compute_80,code=sm_80" in call
        # this nvcc knows no 10.0: PTX is of the newest that it knows
        assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in call
    assert calls[2].count(".cu.o") == 2
    build_cuda.kernels_library(tmp_path / "cache")
    assert len(nvcc.read_text().splitlines()) == 3


def test_failed_kernels_are_remembered(sources, tmp_path, nvcc):
    """Nobody else on the machine compiles what does not compile: until its time is over, or something has changed."""
    cache, broken = tmp_path / "cache", sources / build_cuda.KERNELS / "broken.cu"
    broken.touch()
    with pytest.raises(build.BuildError, match=r"broken\.cu\(1\): error"):
        build_cuda.kernels_library(cache)
    calls = nvcc.read_text()
    with pytest.raises(build.BuildError, match=r"broken\.cu\(1\): error[^§]*s ago.*\.failed is gone"):
        build_cuda.kernels_library(cache)
    assert nvcc.read_text() == calls
    (failure,) = cache.rglob("*.failed")
    long_ago = failure.stat().st_mtime - build_cuda.REMEMBERED_S
    os.utime(failure, (long_ago, long_ago))
    with pytest.raises(build.BuildError) as tried_again:
        build_cuda.kernels_library(cache)
    assert nvcc.read_text() != calls
    assert "ago" not in str(tried_again.value)
    broken.unlink()
    assert build_cuda.kernels_library(cache).is_file()


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("8.0;9.0+PTX", ["arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]"]),
        ("7.5 8.6, 100a", ["arch=compute_86,code=sm_86", "arch=compute_100a,code=sm_100a"]),
        ("Hopper", ["arch=compute_90,code=[sm_90,compute_90]"]),
    ],
)
def test_architectures(text, flags, nvcc, monkeypatch):
    monkeypatch.setenv("BAGUA_CUDA_ARCHS", text)
    found = build_cuda.find_nvcc()
    assert found is not None
    assert build_cuda.arch_flags(found) == [f"-gencode={flag}" for flag in flags]


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(build._sources(build.CORE), id="core"),
        pytest.param(build._sources(build.DEVICE), id="leg"),
        pytest.param(build_plugin._sources((".cpp", ".h")), id="plugin"),
        pytest.param(
            build_cache.files_of(build_cache.SOURCE_DIR, build_cuda.FOLDERS, (".cu", ".cuh", ".h")), id="kernels"
        ),
    ],
)
def test_what_is_included_is_part_of_the_key(files):
    """A header that is not listed would change without a new build."""
    roots = build_cache.include_dirs(build_cache.SOURCE_DIR)
    used = {name for path in files for name in INCLUDE.findall(path.read_text())}
    assert {name for name in used if not any(root / name in files for root in roots)} == set()


@pytest.fixture
def compiler(tmp_path):
    """The command of a compiler that runs a shell's ``script`` with the source as $1 and the object as $2."""

    def write(script):
        program = tmp_path / "compiler"
        program.write_text(f'#!/bin/sh\nset -- "$2" "$4"\n{script}\n')  # -c SOURCE -o OBJECT
        program.chmod(0o755)
        return [str(program)]

    return write


def test_objects_have_different_names_and_are_kept(tmp_path, compiler):
    """torch's builder puts all objects into one folder; ours names them by their folders, too."""
    stems = [path.stem for path in build._sources(build.DEVICE) if path.suffix == ".cpp"]
    assert len(stems) == len(set(stems))
    sources = [tmp_path / "a" / "x.cpp", tmp_path / "b" / "x.cpp"]
    log = tmp_path / "log"
    # The second one is killed when it has written a part of its object.
    command = compiler(f'echo "$1" >> {log}; echo object > "$2"; case "$1" in */b/*) kill -9 $$;; esac')
    with pytest.raises(build_cache.BuildError, match="exit code -9"):
        build_cache.compile_objects(command, sources, tmp_path, tmp_path)
    command = compiler(f'echo "$1" >> {log}; echo whole > "$2"')
    first, second = build_cache.compile_objects(command, sources, tmp_path, tmp_path)
    assert (Path(first).read_text(), Path(second).read_text()) == ("object\n", "whole\n")
    assert sorted(log.read_text().split()) == sorted(map(str, [*sources, sources[1]]))
