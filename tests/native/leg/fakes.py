"""The fakes of the CUDA runtime, NCCL and the kernels as shared libraries, built once per state of their sources."""

import contextlib
import sys
from pathlib import Path

from bagua.csrc.build_cache import default_cache_dir

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import native_build as native  # noqa: E402

REDUCE = [native.CORE / "kernel" / "reduce.cpp", native.CORE / "kernel" / "half.cpp"]
UNITS = {
    "libfake_cuda.so": [HERE / f"fake_cuda_{part}.cpp" for part in ("world", "streams", "memory", "control")],
    "libfake_nccl.so": [HERE / "fake_nccl.cpp", HERE / "fake_nccl_link.cpp", *REDUCE],
    "libfake_kernels.so": [
        *(HERE / "fake_kernels.cpp", native.CORE / "codec" / "transcode.cpp", native.CORE / "codec" / "top_k.cpp"),
        *REDUCE,
    ],
}


def cache_folder():
    """Where the libraries are kept: one folder for all tests, since the compiler takes 13 s of a core."""
    return default_cache_dir() / "test-fakes"


def build(cache, sanitizer=""):
    """The folder with the three libraries; what is missing is compiled (about 20 s). Raises RuntimeError."""
    made = []
    for name, units in UNITS.items():
        link = ["-shared", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", *map(str, made[:1])]  # all need fake CUDA
        made.append(native.build(sanitizer or "portable", cache, units, "-fPIC", f"-I{HERE}", link=link))
    folder = cache / f"fakes-{native.content_key([], *map(str, made))}"
    folder.mkdir(exist_ok=True)
    for name, library in zip(UNITS, made, strict=True):
        with contextlib.suppress(FileExistsError):
            (folder / name).hardlink_to(library)
    return folder


def environment(folder):
    """Variables that make a GPU leg use the libraries in ``folder``."""
    return {
        "BAGUA_DEVICE_CUDART": str(folder / "libfake_cuda.so"),
        "BAGUA_DEVICE_DRIVER": str(folder / "libfake_cuda.so"),
        "BAGUA_DEVICE_NCCL": str(folder / "libfake_nccl.so"),
        "BAGUA_DEVICE_KERNELS": str(folder / "libfake_kernels.so"),
    }
