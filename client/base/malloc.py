"""Thresholds of glibc's malloc for ranks: temporaries of a step stay mapped between steps, and are not faulted in again
page by page."""

from __future__ import annotations

from collections.abc import Mapping

from bagua.base import islands

# (parameter of mallopt, environment variable, value)
_REPLICAS = (
    (-3, "MALLOC_MMAP_THRESHOLD_", 1 << 30),  # larger blocks would be unmapped as soon as they are free
    (-1, "MALLOC_TRIM_THRESHOLD_", (1 << 31) - 1),  # the end of the heap is not given back by itself: see HeapTrimmer
    (-2, "MALLOC_TOP_PAD_", 16 << 20),  # the heap grows by so much at once
)
# Units that FSDP gathers and frees leave holes in a heap, until it is several times the model. Blocks of their own
# leave none, and are kept for the next unit of about that size: csrc/c10d/kept_blocks.h.
_ISLANDS = ((-3, "MALLOC_MMAP_THRESHOLD_", 1 << 20),)


def thresholds(variables: Mapping[str, str]) -> tuple[tuple[int, str, int], ...]:
    """Returns the thresholds of a rank with these variables. Raises ConfigError for no size of islands."""
    return _REPLICAS if islands.size_in(variables) == 1 else _ISLANDS
