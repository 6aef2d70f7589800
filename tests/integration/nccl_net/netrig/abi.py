"""NCCL's plugin interface for ctypes: properties, arguments and tables of v8 and v11, as NCCL documents them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

VERSIONS = (8, 11)
HANDLE_BYTES = 128
MOST_REQUESTS = 32
PTR_HOST, PTR_CUDA, PTR_DMABUF = 1, 2, 4
SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 1, 2, 3, 4, 5, 6
LOG_WARN = 2
OPTIONAL_RECV_COMPLETION = 1
"""The value that an LL receive leaves in ``*request`` before irecv."""

TABLE_BYTES = {8: 152, 11: 176}
PROPERTIES_BYTES = {8: 64, 11: 112}

_HEAD: list[tuple[str, Any]] = [
    ("name", c_char_p),
    ("pciPath", c_char_p),
    ("guid", c_uint64),
    ("ptrSupport", c_int),
    ("regIsGlobal", c_int),
]
_MIDDLE: list[tuple[str, Any]] = [
    *(("speed", c_int), ("port", c_int), ("latency", c_float), ("maxComms", c_int), ("maxRecvs", c_int)),
    *(("netDeviceType", c_int), ("netDeviceVersion", c_int)),
]


class VirtualDevice(ctypes.Structure):
    _fields_ = [("ndevs", c_int), ("devs", c_int * 4)]


class PropertiesV8(ctypes.Structure):
    _fields_ = [*_HEAD, *_MIDDLE]


class PropertiesV11(ctypes.Structure):
    _fields_ = [
        *(*_HEAD, ("forceFlush", c_int), *_MIDDLE, ("vProps", VirtualDevice)),
        *(("maxP2pBytes", c_size_t), ("maxCollBytes", c_size_t), ("maxMultiRequestSize", c_int)),
    ]


PROPERTIES: dict[int, type[ctypes.Structure]] = {8: PropertiesV8, 11: PropertiesV11}


class CommConfig(ctypes.Structure):
    _fields_ = [("trafficClass", c_int)]


class CommAttributes(ctypes.Structure):
    _fields_ = [
        *(("maxConcurrentPeers", c_int32), ("minConcurrentPeers", c_int32)),
        *(("maxFlowsPerPeer", c_int32), ("minFlowsPerPeer", c_int32)),
    ]


class NetAttributes(ctypes.Structure):
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
    profiled = context = () if version == 8 else (_P,)
    init = (_P,) if version == 8 else (_PP, c_uint64, POINTER(CommConfig), _P, _P)
    found: dict[str, tuple[Any, ...]] = {
        "init": init,
        "devices": (_I,),
        "getProperties": (c_int, POINTER(PROPERTIES[version])),
        "listen": (*context, c_int, _P, _PP),
        "connect": (*context, c_int, _P, _PP, _PP),
        "accept": (_P, _PP, _PP),
        "regMr": (_P, _P, c_size_t, c_int, _PP),
        "regMrDmaBuf": (_P, _P, c_size_t, c_int, c_uint64, c_int, _PP),
        "deregMr": (_P, _P),
        "isend": (_P, _P, length, c_int, _P, *profiled, _PP),
        "irecv": (_P, c_int, _PP, lengths, _I, _PP, *(() if version == 8 else (_PP,)), _PP),
        "iflush": (_P, c_int, _PP, _I, _PP, _PP),
        "test": (_P, _I, _I),
        "closeSend": (_P,),
        "closeRecv": (_P,),
        "closeListen": (_P,),
        "getDeviceMr": (_P, _P, _PP),
        "irecvConsumed": (_P, c_int, _P),
    }
    if version == 11:
        found["makeVDevice"] = (_I, POINTER(VirtualDevice))
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
