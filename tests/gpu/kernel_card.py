"""Memory and kernels of the card through plain C interfaces (no torch: compute-sanitizer watches these programs), and
the same on the CPU by the core, for rehearsals."""

import contextlib
import ctypes
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import bagua.csrc
from gpu.kernel_abi import Kernels

Array = npt.NDArray[Any]
TO_CARD, FROM_CARD, ON_CARD = 1, 2, 3
MISSING = "No CUDA runtime (libcudart.so) was found; name it in BAGUA_DEVICE_CUDART."


def _runtime():
    places = [os.environ.get("BAGUA_DEVICE_CUDART", "")]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        places += [str(path) for path in sorted(Path(folder).glob("c*/lib/libcudart.so*"), reverse=True)]
    for path in [*filter(None, places), "libcudart.so", "/usr/local/cuda/lib64/libcudart.so"]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise RuntimeError(MISSING)


class CudaMemory:
    """Memory of card 0: an address. Raises RuntimeError with the error's number."""

    def __init__(self):
        self._cuda = _runtime()
        self._sizes = {}
        self._checked("cudaSetDevice", 0)

    def _checked(self, name, *arguments):
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def empty(self, nbytes):
        """Memory of the card; what lies in it is not known."""
        pointer = ctypes.c_void_p()
        self._checked("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        assert pointer.value
        self._sizes[pointer.value] = nbytes
        return pointer.value

    def put(self, array):
        address = self.empty(array.nbytes)
        self._copy(address, array.ctypes.data, array.nbytes, TO_CARD)
        self._checked("cudaStreamSynchronize", None)
        return address

    def get(self, address, dtype, count):
        """A copy of what lies there, once all work before is done."""
        array = np.zeros(count, dtype)
        self._copy(array.ctypes.data, address, array.nbytes, FROM_CARD)
        self._checked("cudaStreamSynchronize", None)
        return array

    def _copy(self, to, source, nbytes, way):
        if nbytes:
            where = (ctypes.c_void_p(to), ctypes.c_void_p(source))
            self._checked("cudaMemcpyAsync", *where, ctypes.c_size_t(nbytes), way, None)

    def part(self, address, offset):
        return address + offset

    def copy(self, to, source, nbytes):
        self._copy(to, source, nbytes, ON_CARD)

    def free_all(self):
        for address in self._sizes:
            self._checked("cudaFree", ctypes.c_void_p(address))
        self._sizes.clear()


class WithKernels:
    """Calls of the library of kernels: they launch, and return at once."""

    def load(self):
        self.kernels.load()

    def transcode(self, work):
        self.kernels.transcode(work)

    def reduce(self, *what):
        self.kernels.reduce(*what)


class GpuCard(WithKernels, CudaMemory):
    def __init__(self):
        super().__init__()
        self.kernels = Kernels(os.environ.get("BAGUA_DEVICE_KERNELS") or str(bagua.csrc.kernels_library()))
        self._events = [ctypes.c_void_p() for _ in range(2)]
        for event in self._events:
            self._checked("cudaEventCreate", ctypes.byref(event))

    def seconds(self, work, repeats):
        """Seconds of one ``work`` in a row of ``repeats``, by the card's own clock."""
        self._checked("cudaEventRecord", self._events[0], None)
        for _ in range(repeats):
            work()
        self._checked("cudaEventRecord", self._events[1], None)
        self._checked("cudaEventSynchronize", self._events[1])
        milliseconds = ctypes.c_float()
        self._checked("cudaEventElapsedTime", ctypes.byref(milliseconds), *self._events)
        return milliseconds.value / 1000 / repeats


class CpuCard:
    """The same by the core on the CPU. Memory is an array of bytes."""

    def __init__(self):
        self._core = bagua.csrc.load()

    def empty(self, nbytes):
        """Memory at a multiple of 64."""
        memory = np.zeros(nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]

    def put(self, array):
        memory = self.empty(array.nbytes)
        memory[:] = array.view(np.uint8)
        return memory

    def get(self, address, dtype, count):
        return address[: count * np.dtype(dtype).itemsize].view(dtype).copy()

    def part(self, address, offset):
        return address[offset:]

    def copy(self, to, source, nbytes):
        to[:nbytes] = source[:nbytes]

    def free_all(self):
        pass

    def load(self):
        pass

    def transcode(self, work):
        self._core.transcode(**vars(work))

    def reduce(self, *what):
        self._core.reduce(*what)

    def seconds(self, work, repeats):
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - begun) / repeats


class EmulatedCard(WithKernels, CpuCard):
    """Memory of the CPU, and kernels that were compiled for it (tests/native/kernels/emulated.py)."""

    def __init__(self, path):
        super().__init__()
        self.kernels = Kernels(path)


def emulated_library():
    """The kernels' source over an emulated device, for memory of the CPU; BAGUA_DEVICE_KERNELS names another such
    library. Built in the cache when it is first asked for. Raises RuntimeError: the compiler's messages."""
    named = os.environ.get("BAGUA_DEVICE_KERNELS")
    if named:
        return named
    from native.kernels import emulated

    return str(emulated.library(emulated.native.cache_folder()))


def card_of(device):
    """The card ("cuda"), the kernels' source on the CPU ("fake"), or the core's codecs in their place ("cpu")."""
    if device == "cuda":
        return GpuCard()
    return EmulatedCard(emulated_library()) if device == "fake" else CpuCard()
