"""The library of kernels (csrc/gpu/kernels/kernels.h) through ctypes: descriptors, and calls with plain addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Transcode(ctypes.Structure):
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
    """One transcode. Memory is what ``address_of`` of the caller knows: an address, an array, a tensor."""

    codec: int
    count: int
    density: int = 0
    raw: Sequence[Any] = ()
    encoded: Sequence[Any] = ()
    scale: float = 1.0
    residual: Any = None
    message: Any = None
    decoded: Sequence[Any] = field(default_factory=tuple)


def address_of(place):
    """Of an array of numpy's, of a tensor of torch's, or the address itself."""
    if place is None or isinstance(place, int):
        return place
    address = place.data_ptr() if hasattr(place, "data_ptr") else place.ctypes.data
    return address


def _pointers(places):
    return (ctypes.c_void_p * max(1, len(places)))(*(address_of(place) for place in places))


class Kernels:
    """The library. Calls launch on ``stream`` and return at once; RuntimeError tells CUDA's number of the error."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)

    def load(self):
        self._checked("bagua_kernels_load", self._library.bagua_kernels_load())

    def transcode(self, work, stream=0):
        call = Transcode(
            work.codec,
            work.density,
            work.count,
            _pointers(work.raw),
            len(work.raw),
            _pointers(work.encoded),
            len(work.encoded),
            work.scale,
            address_of(work.residual),
            address_of(work.message),
            _pointers(work.decoded),
            len(work.decoded),
        )
        self._launch("bagua_kernels_transcode", call, stream)

    def reduce(self, dtype, op, inputs, output, count, divisor, stream=0):
        call = Reduce(dtype, op, count, _pointers(inputs), len(inputs), address_of(output), divisor)
        self._launch("bagua_kernels_reduce", call, stream)

    def _launch(self, name, call, stream):
        self._checked(name, getattr(self._library, name)(ctypes.byref(call), ctypes.c_void_p(stream)))

    def _checked(self, name, code):
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")
