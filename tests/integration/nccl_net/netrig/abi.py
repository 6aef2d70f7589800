"""NCCL's plugin interface for ctypes: properties, arguments and tables of v8 to v12, as NCCL documents them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int16, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

VERSIONS = (8, 9, 10, 11, 12)
HANDLE_BYTES = 128
MOST_REQUESTS = 32
PTR_HOST, PTR_CUDA, PTR_DMABUF = 1, 2, 4
SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 1, 2, 3, 4, 5, 6
LOG_WARN = 2
OPTIONAL_RECV_COMPLETION = 1
"""The value that an LL receive leaves in ``*request`` before irecv."""

TABLE_BYTES = {8: 152, 9: 160, 10: 160, 11: 176, 12: 176}
PROPERTIES_BYTES = {8: 64, 9: 104, 10: 104, 11: 112, 12: 128}

_HEAD: list[tuple[str, Any]] = [
    ("name", c_char_p),
    ("pciPath", c_char_p),
    ("guid", c_uint64),
    ("ptrSupport", c_int),
    ("regIsGlobal", c_int),
]
_FLUSH: list[tuple[str, Any]] = [("forceFlush", c_int)]
_MIDDLE: list[tuple[str, Any]] = [
    *(("speed", c_int), ("port", c_int), ("latency", c_float), ("maxComms", c_int), ("maxRecvs", c_int)),
    *(("netDeviceType", c_int), ("netDeviceVersion", c_int)),
]


class VirtualDevice4(ctypes.Structure):
    """v9 to v11."""

    _fields_ = [("ndevs", c_int), ("devs", c_int * 4)]


class VirtualDevice8(ctypes.Structure):
    """v12."""

    _fields_ = [("ndevs", c_int), ("devs", c_int * 8)]


_SIZES: list[tuple[str, Any]] = [("maxP2pBytes", c_size_t), ("maxCollBytes", c_size_t)]


class PropertiesV8(ctypes.Structure):
    _fields_ = [*_HEAD, *_MIDDLE]


class PropertiesV9(ctypes.Structure):
    """v9 and v10."""

    _fields_ = [*_HEAD, *_FLUSH, *_MIDDLE, ("vProps", VirtualDevice4), *_SIZES]


class PropertiesV11(ctypes.Structure):
    _fields_ = [*PropertiesV9._fields_, ("maxMultiRequestSize", c_int)]


class PropertiesV12(ctypes.Structure):
    _fields_ = [
        *(*_HEAD, *_FLUSH, *_MIDDLE, ("vProps", VirtualDevice8), *_SIZES, ("maxMultiRequestSize", c_int)),
        *(("railId", c_int16), ("planeId", c_int16)),
    ]


PROPERTIES: dict[int, type[ctypes.Structure]] = {
    8: PropertiesV8,
    9: PropertiesV9,
    10: PropertiesV9,
    11: PropertiesV11,
    12: PropertiesV12,
}


class CommConfig(ctypes.Structure):
    """v10 to v12."""

    _fields_ = [("trafficClass", c_int)]


class CommAttributes(ctypes.Structure):
    _fields_ = [
        *(("maxConcurrentPeers", c_int32), ("minConcurrentPeers", c_int32)),
        *(("maxFlowsPerPeer", c_int32), ("minFlowsPerPeer", c_int32)),
    ]


class NetAttributes(ctypes.Structure):
    """v11 and v12."""

    _fields_ = [
        *(("sendCommAttr", CommAttributes), ("recvCommAttr", CommAttributes)),
        *(("op", c_uint32), ("algo", c_uint32), ("proto", c_uint32)),
    ]


_P, _PP, _I = c_void_p, POINTER(c_void_p), POINTER(c_int)
PROFILER = ctypes.CFUNCTYPE(c_int, _PP, c_int, c_void_p, c_int64, c_void_p)


def arguments(version: int) -> dict[str, tuple[Any, ...]]:
    """Argument types of the table's functions, in the table's order."""
    length = c_int if version == 8 else c_size_t
    lengths = POINTER(length)
    profiled = (_P,) if version >= 10 else ()
    context = (_P,) if version >= 11 else ()
    config = (POINTER(CommConfig),) if version == 10 else ()
    init = {8: (_P,), 9: (_P,), 10: (_P, _P)}.get(version, (_PP, c_uint64, POINTER(CommConfig), _P, _P))
    found: dict[str, tuple[Any, ...]] = {
        "init": init,
        "devices": (_I,),
        "getProperties": (c_int, POINTER(PROPERTIES[version])),
        "listen": (*context, c_int, _P, _PP),
        "connect": (*context, c_int, *config, _P, _PP, _PP),
        "accept": (_P, _PP, _PP),
        "regMr": (_P, _P, c_size_t, c_int, _PP),
        "regMrDmaBuf": (_P, _P, c_size_t, c_int, c_uint64, c_int, _PP),
        "deregMr": (_P, _P),
        "isend": (_P, _P, length, c_int, _P, *profiled, _PP),
        "irecv": (_P, c_int, _PP, lengths, _I, _PP, *((_PP,) if version >= 10 else ()), _PP),
        "iflush": (_P, c_int, _PP, _I, _PP, _PP),
        "test": (_P, _I, _I),
        "closeSend": (_P,),
        "closeRecv": (_P,),
        "closeListen": (_P,),
        "getDeviceMr": (_P, _P, _PP),
        "irecvConsumed": (_P, c_int, _P),
    }
    if version >= 9:
        found["makeVDevice"] = (_I, POINTER(VirtualDevice8 if version == 12 else VirtualDevice4))
    if version >= 11:
        found["finalize"] = (_P,)
        found["setNetAttr"] = (_P, POINTER(NetAttributes))
    return found


def _table(version: int) -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = [("name", c_char_p)]
    fields += [(name, ctypes.CFUNCTYPE(c_int, *types)) for name, types in arguments(version).items()]
    return type(f"TableV{version}", (ctypes.Structure,), {"_fields_": fields})


TABLES = {version: _table(version) for version in VERSIONS}
OPTIONAL = frozenset({"getDeviceMr", "irecvConsumed", "makeVDevice", "regMrDmaBuf", "setNetAttr"})
"""May be NULL: NCCL asks before it calls. regMrDmaBuf may, where ptrSupport has no DMA-BUF."""
