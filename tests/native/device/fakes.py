"""The fakes of the CUDA runtime, NCCL and the kernels as shared libraries, built once per state of their sources."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror")
SANITIZED = {"": (), "tsan": ("-fsanitize=thread", "-Wno-tsan"), "asan": ("-fsanitize=address,undefined",)}
CORE = ("kernel/reduce.cpp", "kernel/half.cpp", "kernel/copy.cpp")
UNITS = {
    "libfake_cuda.so": ("fake_cuda.cpp",),
    "libfake_nccl.so": ("fake_nccl.cpp", "fake_nccl_link.cpp", *CORE),
    "libfake_kernels.so": ("fake_kernels.cpp", "codec/transcode.cpp", "codec/top_k.cpp", *CORE),
}


def _path(unit: str) -> Path:
    return HERE / unit if (HERE / unit).exists() else CSRC / unit


@functools.cache
def _key() -> str:
    digest = hashlib.sha256(repr((FLAGS, SANITIZED, UNITS)).encode())
    files = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), *CSRC.glob("kernel/*"), *CSRC.glob("codec/*")]
    for path in sorted([*files, CSRC / "cuda/kernels.h"]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def build(cache: Path, sanitizer: str = "") -> Path:
    """The folder with the three libraries, built under a lock if need be (about 20 s).

    Raises:
        RuntimeError: the compiler's messages, or that there is no compiler.
    """
    if shutil.which(COMPILER) is None:
        raise RuntimeError(f"no C++ compiler: '{COMPILER}' is not in PATH")
    folder = cache / f"fakes-{sanitizer or 'plain'}-{_key()}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for name, units in UNITS.items():
            if not (folder / name).exists():
                _link(folder, name, units, SANITIZED[sanitizer])
    return folder


def _link(folder: Path, name: str, units: tuple[str, ...], extra: tuple[str, ...]) -> None:
    needs = [] if name == "libfake_cuda.so" else [f"-L{folder}", "-lfake_cuda", "-Wl,-rpath,$ORIGIN"]
    part = folder / f"{name}.part"
    command = [COMPILER, *FLAGS, *extra, f"-I{CSRC}", f"-I{HERE}", f"-Wl,-soname,{name}"]
    command += [*(str(_path(unit)) for unit in units), *needs, "-o", str(part)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    part.rename(folder / name)


def environment(folder: Path) -> dict[str, str]:
    """Variables that make a GPU leg use the libraries in ``folder``."""
    return {
        "BAGUA_DEVICE_CUDART": str(folder / "libfake_cuda.so"),
        "BAGUA_DEVICE_DRIVER": str(folder / "libfake_cuda.so"),
        "BAGUA_DEVICE_NCCL": str(folder / "libfake_nccl.so"),
        "BAGUA_DEVICE_KERNELS": str(folder / "libfake_kernels.so"),
    }
