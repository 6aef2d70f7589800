"""``bagua net``: the network plugin that gives NCCL several TCP streams, for any program that uses NCCL."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from bagua.base.errors import BuildError, ServiceError


class Properties(ctypes.Structure):
    """C structure ``ncclNetProperties_v8_t``."""

    _fields_ = [
        *(("name", ctypes.c_char_p), ("pci_path", ctypes.c_char_p), ("guid", ctypes.c_uint64)),
        *(("ptr_support", ctypes.c_int), ("reg_is_global", ctypes.c_int), ("speed", ctypes.c_int)),
        *(("port", ctypes.c_int), ("latency", ctypes.c_float), ("max_comms", ctypes.c_int)),
        *(("max_recvs", ctypes.c_int), ("device_type", ctypes.c_int), ("device_version", ctypes.c_int)),
    ]


class Table(ctypes.Structure):
    """The beginning of the C structure ``ncclNet_v8_t``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("devices", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))),
        ("properties", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(Properties))),
    ]


def built_plugin() -> Path:
    """The plugin, built first if need be; standard error says so. Raises BuildError."""
    from bagua import csrc
    from bagua.csrc.build_plugin import find_net_plugin

    try:
        found = find_net_plugin()
        if found is None:
            print("building Bagua-Net (some seconds, once)", file=sys.stderr, flush=True)
            found = csrc.net_plugin()
        return found
    except csrc.BuildError as error:
        raise BuildError(str(error)) from error


def devices(library: Path) -> list[dict[str, Any]]:
    """Interfaces that NCCL would see here. The plugin's warnings go to standard error. Raises ServiceError."""
    try:
        table = Table.in_dll(ctypes.CDLL(str(library)), "ncclNetPlugin_v8")
    except (OSError, ValueError) as error:
        raise ServiceError(f"The plugin {library} can't be loaded: {error} [BG211]") from error
    count = ctypes.c_int()
    if table.init(None) or table.devices(ctypes.byref(count)):
        raise ServiceError("The plugin finds no network interface that it may use: NCCL would refuse it. [BG211]")
    found = []
    for index in range(count.value):
        one = Properties()
        if table.properties(index, ctypes.byref(one)):
            raise ServiceError(f"The plugin does not tell the properties of its device {index}. [BG211]")
        path = one.pci_path.decode() if one.pci_path else None
        found.append({"device": index, "interface": one.name.decode(), "mbits": one.speed, "pci": path})
    return found
