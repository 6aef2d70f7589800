"""The libraries beside the core: the network plugin (g++ alone), and the CUDA kernels (nvcc: mostly a small stand-in).

Tiny sources, the real locking, keys and commands.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
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
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvcc 12.4 as CUDA_HOME; returns the file of its calls."""
    script = tmp_path / "toolkit" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(NVCC)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(script.parent.parent))
    for variable in ("BAGUA_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CXX", *build_cuda.NVCC_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    return script.parent / "calls"


def test_plugin_is_built_once_and_loads(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert build_plugin.net_plugin_built(cache) is None
    plugin = build_plugin.net_plugin(cache)
    assert plugin.name == "libnccl-net-bagua.so"
    made = plugin.stat().st_mtime_ns
    assert build_plugin.net_plugin(cache) == build_plugin.net_plugin_built(cache) == plugin
    assert plugin.stat().st_mtime_ns == made
    library = ctypes.CDLL(str(plugin))
    assert library.ncclNetPlugin_v0() == 42
    assert not hasattr(library, "_Z5innerv")  # NCCL's process may have others of that name
    assert sorted(path.name for path in plugin.parent.parent.iterdir()) == [
        plugin.parent.name,
        plugin.parent.name + ".lock",
    ]
    (sources / "core/base" / "a.h").write_text("int inner();  // other\n")
    assert build_plugin.net_plugin_built(cache) is None


def test_plugin_that_does_not_compile(sources: Path, tmp_path: Path) -> None:
    (sources / "nccl_net" / "b.cpp").write_text("int broken( {\n")
    with pytest.raises(build.BuildError, match=r"nccl_net/b\.cpp:1:.*error"):
        build_plugin.net_plugin(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_no_sources_and_no_place_are_named(sources: Path, tmp_path: Path, nvcc: Path) -> None:
    (tmp_path / "file").touch()
    for make in (build_plugin.net_plugin, build_cuda.kernels_library):
        with pytest.raises(build.BuildError, match="BAGUA_CACHE_DIR"):
            make(tmp_path / "file")
    shutil.rmtree(sources / "nccl_net")
    shutil.rmtree(sources / build_cuda.KERNELS)
    for make in (build_plugin.net_plugin, build_cuda.kernels_library):
        with pytest.raises(build.BuildError, match=r"no .*sources in"):
            make(tmp_path / "cache")


def test_no_compiler_is_named(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"No C\+\+ compiler.*apt-get install g\+\+"):
        build_plugin.net_plugin(tmp_path / "cache")


def test_kernels_are_compiled_each_then_linked(sources: Path, tmp_path: Path, nvcc: Path) -> None:
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


def test_kernels_that_do_not_compile(sources: Path, tmp_path: Path, nvcc: Path) -> None:
    (sources / build_cuda.KERNELS / "broken.cu").touch()
    with pytest.raises(build.BuildError, match=r"exit code 2[^§]*broken\.cu\(1\): error"):
        build_cuda.kernels_library(tmp_path / "cache")


def test_failed_kernels_are_remembered(sources: Path, tmp_path: Path, nvcc: Path) -> None:
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


def test_warnings_are_errors_where_asked(
    sources: Path, tmp_path: Path, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc reads the variable itself; a library that was built without it does not count."""
    path = build_cuda.kernels_library(tmp_path)
    assert "Werror" not in nvcc.read_text()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--Werror=all-warnings")
    assert build_cuda.kernels_built(tmp_path) is None
    assert build_cuda.kernels_library(tmp_path) != path


def test_key_of_kernels(sources: Path, tmp_path: Path, nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {build_cuda.kernels_library(tmp_path)}
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    paths.add(build_cuda.kernels_library(tmp_path))
    monkeypatch.setenv("BAGUA_CUDA_ARCHS", "9.0a")
    paths.add(build_cuda.kernels_library(tmp_path))
    (sources / "core/base" / "a.h").write_text("int c;\n")
    paths.add(build_cuda.kernels_library(tmp_path))
    assert len(paths) == 4


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("8.0;9.0+PTX", ["arch=compute_80,code=sm_80", "arch=compute_90,code=[sm_90,compute_90]"]),
        ("7.5 8.6, 100a", ["arch=compute_86,code=sm_86", "arch=compute_100a,code=sm_100a"]),
        ("Hopper", ["arch=compute_90,code=[sm_90,compute_90]"]),
    ],
)
def test_architectures(text: str, flags: list[str], nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_CUDA_ARCHS", text)
    found = build_cuda.find_nvcc()
    assert found is not None
    assert build_cuda.arch_flags(found) == [f"-gencode={flag}" for flag in flags]


@pytest.mark.parametrize(("text", "words"), [("fast", "'fast' is no CUDA"), ("7.0;7.5", "8.0 or newer")])
def test_wrong_architectures_are_named(text: str, words: str, nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(build.BuildError, match=f"TORCH_CUDA_ARCH_LIST=.*{words}"):
        build_cuda.kernels_library()


def test_nvcc_is_found_in_pips_wheels(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the namespace package ``nvidia``, with `lib` and no `lib64`."""
    home = tmp_path / "site" / "nvidia" / "cu13"
    shutil.copytree(nvcc.parent, home / "bin")
    (home.parent / "__init__.py").touch()  # as wheels for CUDA 12 have it; goes before what is installed here
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert home / "bin" / "nvcc" in build_cuda._candidates()
    monkeypatch.setattr(build_cuda, "_candidates", lambda: [home / "bin" / "nvcc"])
    found = build_cuda.find_nvcc()
    assert found == build_cuda.Nvcc(str(home / "bin" / "nvcc"), "12.4", home)


def test_missing_nvcc_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build_cuda, "_candidates", lambda: [tmp_path / "bin" / "nvcc"])
    assert build_cuda.find_nvcc() is None
    with pytest.raises(build.BuildError, match=r"nvcc.*bin/nvcc.*CUDA_HOME.*pip install"):
        build_cuda.kernels_library(tmp_path)


def test_kernels_of_a_real_nvcc(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for one architecture, for speed; it loads without a driver. A warning is an error where it is asked."""
    if build_cuda.find_nvcc() is None:
        pytest.skip("no nvcc on this machine")
    monkeypatch.setenv("BAGUA_CUDA_ARCHS", "9.0")
    for variable in build_cuda.NVCC_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    (sources / build_cuda.KERNELS / "a.cu").write_text(
        '#define SEEN __attribute__((visibility("default")))\n'
        "__global__ void nothing() {}\nstatic void unused() {}\n"
        'extern "C" SEEN int answer() { nothing<<<1, 1>>>(); (void)cudaGetLastError(); return 42; }\n'
    )
    library = ctypes.CDLL(str(build_cuda.kernels_library(tmp_path / "cache")))
    assert library.answer() == 42
    assert not hasattr(library, "cudaGetLastError")  # its runtime is its own
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--Werror=all-warnings")
    with pytest.raises(build.BuildError, match="unused"):
        build_cuda.kernels_library(tmp_path / "cache")


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
def test_what_is_included_is_part_of_the_key(files: list[Path]) -> None:
    """A header that is not listed would change without a new build."""
    roots = build_cache.include_dirs(build_cache.SOURCE_DIR)
    used = {name for path in files for name in INCLUDE.findall(path.read_text())}
    assert {name for name in used if not any(root / name in files for root in roots)} == set()


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str], list[str]]:
    """The command of a compiler that runs a shell's ``script`` with the source as $1 and the object as $2."""

    def write(script: str) -> list[str]:
        program = tmp_path / "compiler"
        program.write_text(f'#!/bin/sh\nset -- "$2" "$4"\n{script}\n')  # -c SOURCE -o OBJECT
        program.chmod(0o755)
        return [str(program)]

    return write


def test_objects_have_different_names_and_are_kept(tmp_path: Path, compiler: Callable[[str], list[str]]) -> None:
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


def test_compilers_run_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Callable[[str], list[str]]
) -> None:
    """Each waits until the other has begun."""
    monkeypatch.setenv("MAX_JOBS", "2")
    os.mkfifo(tmp_path / "pipe")
    pipe = tmp_path / "pipe"
    command = compiler(f'case "$1" in */a.cpp) echo x > {pipe};; *) cat {pipe};; esac; touch "$2"')
    build_cache.compile_objects(command, [tmp_path / "a.cpp", tmp_path / "b.cpp"], tmp_path, tmp_path)
