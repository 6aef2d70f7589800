"""Builds native code on first use and loads it: ``load()`` the core, ``load_device()`` the GPU leg (see build.py);
``kernels_library()`` and ``net_plugin()`` are shared libraries (build_cuda.py, build_plugin.py)."""

from bagua.csrc.build import built, core_path, describe, is_built, load, load_c10d, load_device, progress
from bagua.csrc.build_cache import BuildError
from bagua.csrc.build_cuda import kernels_library
from bagua.csrc.build_plugin import net_plugin

__all__ = [
    "BuildError",
    "built",
    "core_path",
    "describe",
    "is_built",
    "kernels_library",
    "load",
    "load_c10d",
    "load_device",
    "net_plugin",
    "progress",
]
