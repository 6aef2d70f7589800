"""Sets glibc's and torch's allocators for training, and gives holes of the heap that nothing uses back."""

from __future__ import annotations

import ctypes
import logging
import os
import time

from bagua import csrc
from bagua.base import islands, malloc
from bagua.torch_api.job import environment

LOG = logging.getLogger("bagua")


def keep_memory() -> None:
    """Sets the thresholds of this process, as a node daemon does for ranks that it starts. A setting that the
    environment makes is left alone, and BAGUA_KEEP_MEMORY=0 leaves all of them. Does nothing where the C library is
    another one."""
    libc = _glibc()
    if libc is None:
        return
    if islands.size_in(os.environ) > 1:
        try:
            csrc.load_c10d().keep_blocks()
        except csrc.BuildError as error:
            LOG.warning("Memory of FSDP's units is faulted in anew in each step, which takes time: %s", error)
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):  # the user's own settings win
        return
    for parameter, variable, value in malloc.thresholds(os.environ):
        if variable not in os.environ:
            libc.mallopt(parameter, value)


def _glibc() -> ctypes.CDLL | None:
    """glibc, if this process uses it and BAGUA_KEEP_MEMORY does not forbid to touch it."""
    if environment.read_int("BAGUA_KEEP_MEMORY", 1) == 0:
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - glibc alone has it
    except (OSError, AttributeError):
        return None
    return libc


class HeapTrimmer:
    """Gives holes of the heap back to the system.

    The heap of a model with few large parameters grows, over some steps, by the size of a gradient or two: activations
    are cut from the chunk that the last step's gradients left, and one of the next gradients no longer fits there.
    """

    SMALLEST = 32 << 20  # bytes, of a hole worth a look
    TRIES = 4  # after so many that brought nothing for long, the memory counts as used
    NS_PER_BYTE = 0.3  # to fault memory in again
    SHARE = 50  # that may take one part in so many of the time

    def __init__(self) -> None:
        self._libc = _glibc()
        self._page = os.sysconf("SC_PAGESIZE")
        self._used = self._resident()
        self._tries: list[int] = []  # bytes held before each trim
        self._next_ns = 0

    def after_pass(self) -> None:
        """Looks at the memory of this process, and trims the heap if it has grown."""
        if self._libc is None:
            return
        held = self._resident()
        self._used = min(self._used, held)
        if held < self._used + self.SMALLEST:
            self._tries.clear()
            return
        now = time.monotonic_ns()
        if now < self._next_ns:
            return
        self._tries.append(held)
        if len(self._tries) > self.TRIES:
            self._used = min(self._tries[1:])
            self._tries.clear()
            return
        self._libc.malloc_trim(0)
        freed = held - self._resident()
        self._next_ns = now + int(max(freed, self.SMALLEST) * self.NS_PER_BYTE * self.SHARE)

    def _resident(self) -> int:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * self._page
