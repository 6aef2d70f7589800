"""Finds nvcc, and builds the library of CUDA kernels (``gpu/kernels/``) with it. Neither torch nor a GPU is needed."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bagua.csrc import build_cache
from bagua.csrc.build_cache import SOURCE_DIR, BuildError
from bagua.csrc.build_progress import Progress, told

LIBRARY = "libbagua_kernels.so"
KERNELS = "gpu/kernels"
# Sources of the kernels: .cu files of ``gpu/kernels``, and headers that they share with the CPU's codecs.
FOLDERS = (KERNELS, "core/codec", "core/kernel", "core/base")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
)
# Flags that nvcc takes from the environment. A warning is no error, for other host compilers may warn: where our tests
# build, NVCC_APPEND_FLAGS is --Werror=all-warnings.
NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
REMEMBERED_S = 600.0  # for so long a build that failed is not tried again: each rank would wait for it a minute
# The runtime goes into the library: it need not be the version that torch brought. Streams, pointers and the device's
# primary context belong to the driver and are the same for both.
# --exclude-libs hides its names, which torch's own runtime has, too.
LINK_FLAGS = ("-shared", "-cudart=static", "-Xlinker=--exclude-libs,ALL")
# A GPU runs code of its major version, and PTX serves newer ones: 8.0 is for 8.6 and 8.9, too.
DEFAULT_ARCHS = ("8.0", "9.0", "10.0")
OLDEST_ARCH = (8, 0)
_NAMED_ARCHS = {
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}
_ARCH = re.compile(r"^(\d+)\.?(\d)([af]?)(\+PTX)?$")
_VERSION_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its path, its release ("13.0"), the root of its tree."""

    path: str
    release: str
    home: Path


def _candidates() -> list[Path]:
    """Lists places where nvcc may lie, the best first: CUDA_HOME, the PATH, the usual folder, wheels of pip
    (nvidia/cu13).
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    if on_path:
        found.append(Path(on_path))
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels else []:
        found += sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)
    return found


def find_nvcc() -> Nvcc | None:
    """The first nvcc that answers, or None."""
    for path in _candidates():
        if os.access(path, os.X_OK):
            found = _ask(str(path))
            if found:
                return found
    return None


@functools.cache
def _ask(path: str) -> Nvcc | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release ([\d.]+)", done.stdout)
    if done.returncode or release is None:
        return None
    return Nvcc(path, release.group(1), Path(path).resolve().parent.parent)


def _no_nvcc() -> BuildError:
    looked = ", ".join(dict.fromkeys(str(path) for path in _candidates()))
    return BuildError(
        f"No CUDA compiler (nvcc): looked for {looked} and pip's nvidia/cu*. Without it there are no GPU kernels. "
        "Install the CUDA toolkit, or name its folder with CUDA_HOME, or `pip install nvidia-cuda-nvcc "
        "nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt nvidia-nvvm` in the versions of the driver's CUDA; or "
        "name a library that was built elsewhere with BAGUA_DEVICE_KERNELS. [BG207]"
    )


def _parse(text: str, source: str) -> list[tuple[int, int, str, bool]]:
    """Returns (major, minor, suffix, with PTX) of each entry of a list as TORCH_CUDA_ARCH_LIST has it."""
    found = []
    for name in re.split(r"[;, ]+", text.strip()):
        for entry in _NAMED_ARCHS.get(name.removesuffix("+PTX"), name).split(";"):
            match = _ARCH.match(entry)
            if match is None:
                raise BuildError(
                    f"{source}={text!r}: {entry!r} is no CUDA architecture. Write numbers, such as '8.0;9.0+PTX', or "
                    "set BAGUA_CUDA_ARCHS to such a list. [BG207]"
                )
            found.append((int(match[1]), int(match[2]), match[3], match[4] is not None))
    return found


def _supported(nvcc: Nvcc) -> set[str]:
    """Names such as "90" that this nvcc compiles for; empty if it does not say."""
    done = subprocess.run(
        [nvcc.path, "--list-gpu-arch"], capture_output=True, text=True, timeout=_VERSION_DEADLINE_S, check=False
    )
    return set(re.findall(r"compute_(\d+)", done.stdout))


def arch_flags(nvcc: Nvcc) -> list[str]:
    """``-gencode`` for BAGUA_CUDA_ARCHS, else TORCH_CUDA_ARCH_LIST, else DEFAULT_ARCHS as far as this nvcc knows them,
    and PTX of the newest for what comes later. Older ones than 8.0 are left out. Raises BuildError."""
    for source in ("BAGUA_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        text = os.environ.get(source, "").strip()
        if text:
            wanted = [entry for entry in _parse(text, source) if entry[:2] >= OLDEST_ARCH]
            if not wanted:
                raise BuildError(f"{source}={text!r}: the kernels need a GPU of architecture 8.0 or newer. [BG207]")
            break
    else:
        known = _supported(nvcc)
        wanted = [
            entry
            for entry in _parse(";".join(DEFAULT_ARCHS), "DEFAULT_ARCHS")
            if not known or f"{entry[0]}{entry[1]}" in known
        ]
        wanted[-1] = (*wanted[-1][:3], True)  # drivers compile PTX for GPUs that this nvcc does not know
    flags = []
    for major, minor, suffix, ptx in wanted:
        name = f"{major}{minor}{suffix}"
        code = f"[sm_{name},compute_{name}]" if ptx else f"sm_{name}"
        flags.append(f"-gencode=arch=compute_{name},code={code}")
    return flags


def _host_compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    return [f"-ccbin={chosen}"] if chosen else []


def _kernels_path(nvcc: Nvcc, cache_dir: Path | None) -> Path:
    parts = [
        build_cache.digest(SOURCE_DIR, build_cache.files_of(SOURCE_DIR, FOLDERS, (".cu", ".cuh", ".h"))),
        " ".join([*FLAGS, *LINK_FLAGS, *_host_compiler(), *arch_flags(nvcc)]),
        *(os.environ.get(name, "") for name in NVCC_VARIABLES),
        nvcc.release,
        *build_cache.processor_parts()[:1],  # the host's code has no -march, so one build serves all processors
    ]
    return build_cache.place("kernels", build_cache.key(parts), LIBRARY, cache_dir)


def kernels_built(cache_dir: Path | None = None) -> Path | None:
    """Returns the fitting library if it is built. Raises BuildError if it could not be."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise _no_nvcc()
    target = _kernels_path(nvcc, cache_dir)
    return target if target.is_file() else None


def kernels_library(cache_dir: Path | None = None) -> Path:
    """The library of CUDA kernels (interface: gpu/kernels/kernels.h), built first if need be, once for all who ask.

    Raises BuildError: nvcc is missing, or its last lines, which are remembered for REMEMBERED_S.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise _no_nvcc()
    target = _kernels_path(nvcc, cache_dir)
    if target.is_file():
        return target
    try:
        with told(Progress("library of CUDA kernels", build_cache.building_folder(target), len(_units()))):
            return build_cache.make_once(target, lambda folder: _compile(nvcc, folder), REMEMBERED_S)
    except OSError as error:
        raise build_cache.unwritable("library of CUDA kernels", target, error) from error


def _units() -> list[Path]:
    return build_cache.files_of(SOURCE_DIR, (KERNELS,), (".cu",))


def _compile(nvcc: Nvcc, folder: Path) -> None:
    sources = _units()
    if not sources:
        raise BuildError(
            f"There are no CUDA sources in {SOURCE_DIR / KERNELS}: the installation is not complete. [BG208]"
        )
    base = [nvcc.path, *_host_compiler()]
    compiler = [*base, *FLAGS, *arch_flags(nvcc), *build_cache.include_flags(SOURCE_DIR)]
    objects = build_cache.compile_objects(compiler, sources, SOURCE_DIR, folder)
    # pip's tree has `lib`, where nvcc looks in `lib64`.
    beside = [f"-L{nvcc.home / 'lib'}"] if (nvcc.home / "lib").is_dir() else []
    build_cache.run_compiler([*base, *LINK_FLAGS, *beside, *objects, "-o", str(folder / LIBRARY)])
