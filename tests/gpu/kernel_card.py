"""Memory and kernels of the card through plain C interfaces (no torch: compute-sanitizer watches these programs), and
the same on the CPU by the core, for rehearsals."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import bagua.csrc

Array = npt.NDArray[Any]
TO_CARD, FROM_CARD, ON_CARD = 1, 2, 3
MISSING = "No CUDA runtime (libcudart.so) was found; name it in BAGUA_DEVICE_CUDART."


class Transcode(ctypes.Structure):
    """BaguaTranscode of csrc/cuda/kernels.h."""

    _fields_ = (
        ("codec", ctypes.c_uint8),
        ("density", ctypes.c_uint16),
        ("count", ctypes.c_uint64),
        ("raw", ctypes.POINTER(ctypes.c_void_p)),
        ("raws", ctypes.c_int32),
        ("encoded", ctypes.POINTER(ctypes.c_void_p)),
        ("encodeds", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("residual", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("decoded", ctypes.POINTER(ctypes.c_void_p)),
        ("decodeds", ctypes.c_int32),
    )


class Reduce(ctypes.Structure):
    """BaguaReduce of csrc/cuda/kernels.h."""

    _fields_ = (
        ("dtype", ctypes.c_uint8),
        ("op", ctypes.c_uint8),
        ("count", ctypes.c_uint64),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("input_count", ctypes.c_int32),
        ("output", ctypes.c_void_p),
        ("divisor", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Work:
    """One transcode: memory is what the card's ``put`` returned."""

    codec: int
    count: int
    density: int = 0
    raw: Sequence[Any] = ()
    encoded: Sequence[Any] = ()
    scale: float = 1.0
    residual: Any = None
    message: Any = None
    decoded: Sequence[Any] = field(default_factory=tuple)


def _runtime() -> ctypes.CDLL:
    places = [os.environ.get("BAGUA_DEVICE_CUDART", "")]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        places += [str(path) for path in sorted(Path(folder).glob("c*/lib/libcudart.so*"), reverse=True)]
    for path in [*filter(None, places), "libcudart.so", "/usr/local/cuda/lib64/libcudart.so"]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    raise RuntimeError(MISSING)


def _address(place: Any) -> int | None:
    return place.ctypes.data if isinstance(place, np.ndarray) else place


def _pointers(places: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * max(1, len(places)))(*(_address(place) for place in places))


class Kernels:
    """The library of kernels. Memory is an address, or an array. Raises RuntimeError with the error's number."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def transcode(self, work: Work) -> None:
        """Launches the kernel on the default stream."""
        call = Transcode(
            work.codec,
            work.density,
            work.count,
            _pointers(work.raw),
            len(work.raw),
            _pointers(work.encoded),
            len(work.encoded),
            work.scale,
            _address(work.residual),
            _address(work.message),
            _pointers(work.decoded),
            len(work.decoded),
        )
        self._launched(self._library.bagua_kernels_transcode(ctypes.byref(call), None))

    def reduce(self, dtype: int, op: int, inputs: Sequence[Any], output: Any, count: int, divisor: int) -> None:
        """Launches the kernel on the default stream."""
        call = Reduce(dtype, op, count, _pointers(inputs), len(inputs), _address(output), divisor)
        self._launched(self._library.bagua_kernels_reduce(ctypes.byref(call), None))

    def _launched(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the kernel could not be launched: CUDA error {code}")


class GpuCard:
    """Card 0. Memory is an address. Raises RuntimeError with the error's number."""

    def __init__(self) -> None:
        self._cuda = _runtime()
        self._kernels = Kernels(os.environ.get("BAGUA_DEVICE_KERNELS") or str(bagua.csrc.kernels_library()))
        self._sizes: dict[int, int] = {}
        self._events = [ctypes.c_void_p() for _ in range(2)]
        self._checked("cudaSetDevice", 0)
        for event in self._events:
            self._checked("cudaEventCreate", ctypes.byref(event))

    def _checked(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def empty(self, nbytes: int) -> int:
        """Memory of the card; what lies in it is not known."""
        pointer = ctypes.c_void_p()
        self._checked("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        assert pointer.value
        self._sizes[pointer.value] = nbytes
        return pointer.value

    def put(self, array: Array) -> int:
        """A copy of an array."""
        address = self.empty(array.nbytes)
        self._copy(address, array.ctypes.data, array.nbytes, TO_CARD)
        return address

    def get(self, address: int, dtype: Any, count: int) -> Array:
        """A copy of what lies there, once all work before is done."""
        array = np.zeros(count, dtype)
        self._checked("cudaDeviceSynchronize")
        self._copy(array.ctypes.data, address, array.nbytes, FROM_CARD)
        return array

    def _copy(self, to: int, source: int, nbytes: int, way: int) -> None:
        if nbytes:
            self._checked("cudaMemcpy", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), way)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copies on the card."""
        self._copy(to, source, nbytes, ON_CARD)

    def free_all(self) -> None:
        """Gives back all memory."""
        for address in self._sizes:
            self._checked("cudaFree", ctypes.c_void_p(address))
        self._sizes.clear()

    def transcode(self, work: Work) -> None:
        """Launches the kernel; returns at once."""
        self._kernels.transcode(work)

    def reduce(self, dtype: int, op: int, inputs: Sequence[int], output: int, count: int, divisor: int) -> None:
        """Launches the kernel; returns at once."""
        self._kernels.reduce(dtype, op, inputs, output, count, divisor)

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
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

    def __init__(self) -> None:
        self._core = bagua.csrc.load()

    def empty(self, nbytes: int) -> Array:
        """Memory at a multiple of 64."""
        memory = np.zeros(nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]

    def put(self, array: Array) -> Array:
        """A copy of an array."""
        memory = self.empty(array.nbytes)
        memory[:] = array.view(np.uint8)
        return memory

    def get(self, address: Array, dtype: Any, count: int) -> Array:
        """A copy of what lies there."""
        found: Array = address.view(dtype)[:count].copy()
        return found

    def copy(self, to: Array, source: Array, nbytes: int) -> None:
        """Copies."""
        to[:nbytes] = source[:nbytes]

    def free_all(self) -> None:
        """Nothing to do."""

    def transcode(self, work: Work) -> None:
        """The codec of the core."""
        self._core.transcode(
            work.codec,
            work.count,
            raw=work.raw,
            encoded=work.encoded,
            scale=work.scale,
            residual=work.residual,
            message=work.message,
            decoded=work.decoded,
            density=work.density,
        )

    def reduce(self, dtype: int, op: int, inputs: Sequence[Array], output: Array, count: int, divisor: int) -> None:
        """The reduction of the core."""
        self._core.reduce(dtype, op, inputs, output, count, divisor)

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds of one ``work`` in a row."""
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - begun) / repeats


class EmulatedCard(CpuCard):
    """Memory of the CPU, and kernels that were compiled for it (tests/native/cuda/emulated.py)."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._kernels = Kernels(path)

    def transcode(self, work: Work) -> None:
        """The library's codec."""
        self._kernels.transcode(work)

    def reduce(self, dtype: int, op: int, inputs: Sequence[Array], output: Array, count: int, divisor: int) -> None:
        """The library's reduction."""
        self._kernels.reduce(dtype, op, inputs, output, count, divisor)


def card_of(device: str) -> GpuCard | CpuCard:
    """The card; in a rehearsal the CPU, with the library of BAGUA_DEVICE_KERNELS if that is set."""
    if device == "cuda":
        return GpuCard()
    path = os.environ.get("BAGUA_DEVICE_KERNELS")
    return EmulatedCard(path) if path else CpuCard()
