"""Sets glibc's allocator for training: temporaries of a step stay mapped between steps, and are not faulted in again
page by page."""

from __future__ import annotations

import ctypes
import os

from bagua.torch_api.join import environment

# (parameter of mallopt, environment variable, value); a node daemon starts its ranks with these variables
SETTINGS = (
    (-3, "MALLOC_MMAP_THRESHOLD_", 1 << 30),
    (-1, "MALLOC_TRIM_THRESHOLD_", (1 << 31) - 1),
    (-2, "MALLOC_TOP_PAD_", 16 << 20),
)


def keep_memory() -> None:
    """Sets the thresholds of this process, as a node daemon does for ranks that it starts. A setting that the
    environment makes is left alone, and BAGUA_KEEP_MEMORY=0 leaves all of them. Does nothing where the C library is
    another one."""
    if environment.read_int("BAGUA_KEEP_MEMORY", 1) == 0 or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - glibc alone has it
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return
    for parameter, variable, value in SETTINGS:
        if variable not in os.environ:
            mallopt(parameter, value)
