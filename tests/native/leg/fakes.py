"""The fakes of the CUDA runtime, NCCL and the kernels as shared libraries, built once per state of their sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from bagua.csrc.build_cache import default_cache_dir

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror")
SANITIZED = {"": (), "tsan": ("-fsanitize=thread", "-Wno-tsan"), "asan": ("-fsanitize=address,undefined",)}
CORE = ("core/kernel/reduce.cpp", "core/kernel/half.cpp")
UNITS = {
    "libfake_cuda.so": tuple(f"fake_cuda_{part}.cpp" for part in ("world", "streams", "memory", "control")),
    "libfake_nccl.so": ("fake_nccl.cpp", "fake_nccl_link.cpp", *CORE),
    "libfake_kernels.so": ("fake_kernels.cpp", "core/codec/transcode.cpp", "core/codec/top_k.cpp", *CORE),
}


def _path(unit):
    return HERE / unit if (HERE / unit).exists() else CSRC / unit


def _key(units, *extra):
    """Of what the units are made from; of headers those that any of them may include."""
    digest = hashlib.sha256(repr((COMPILER, FLAGS, extra)).encode())
    headers = [
        *HERE.glob("*.h"),
        *CSRC.glob("core/kernel/*.h"),
        *CSRC.glob("core/codec/*.h"),
        CSRC / "gpu/kernels/kernels.h",
    ]
    for path in sorted([*headers, *(_path(unit) for unit in units)]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _run(command, target):
    """Makes ``target`` whole or not at all."""
    part = target.with_suffix(".part")
    result = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
    part.rename(target)


def cache_folder():
    """Where the libraries are kept: one folder for all tests, since the compiler takes 13 s of a core."""
    return default_cache_dir() / "test-fakes"


def build(cache, sanitizer=""):
    """The folder with the three libraries; what is missing is compiled under a lock (about 20 s).

    Raises:
        RuntimeError: the compiler's messages, or that there is no compiler.
    """
    if shutil.which(COMPILER) is None:
        raise RuntimeError(f"no C++ compiler: '{COMPILER}' is not in PATH")
    extra = SANITIZED[sanitizer]
    folder = cache / f"fakes-{_key(tuple(sum(UNITS.values(), ())), *extra)}"
    folder.mkdir(parents=True, exist_ok=True)
    with (cache / ".fakes.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for name, units in UNITS.items():
            if not (folder / name).exists():
                _link(folder, name, [_compile(cache, unit, extra) for unit in units], extra)
    return folder


def _compile(cache, unit, extra):
    target = cache / f"{Path(unit).stem}-{_key((unit,), *extra)}.o"
    if not target.exists():
        _run([COMPILER, *FLAGS, *extra, f"-I{CSRC / 'core'}", f"-I{CSRC}", f"-I{HERE}", "-c", str(_path(unit))], target)
    return target


def _link(folder, name, objects, extra):
    needs = [] if name == "libfake_cuda.so" else [f"-L{folder}", "-lfake_cuda", "-Wl,-rpath,$ORIGIN"]
    _run([COMPILER, *FLAGS, *extra, "-shared", f"-Wl,-soname,{name}", *map(str, objects), *needs], folder / name)


def environment(folder):
    """Variables that make a GPU leg use the libraries in ``folder``."""
    return {
        "BAGUA_DEVICE_CUDART": str(folder / "libfake_cuda.so"),
        "BAGUA_DEVICE_DRIVER": str(folder / "libfake_cuda.so"),
        "BAGUA_DEVICE_NCCL": str(folder / "libfake_nccl.so"),
        "BAGUA_DEVICE_KERNELS": str(folder / "libfake_kernels.so"),
    }
