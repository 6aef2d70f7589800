"""Shares out tensors that all ranks have alike: each rank writes about as many bytes. It is pure: values alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SMALL_BYTES = 1 << 20  # a tensor of fewer bytes is not cut: many small pieces take longer to write


class Size(NamedTuple):
    """Size of a tensor: rows along its first dimension (1 if it has none), and bytes of each."""

    rows: int
    row_bytes: int


class Portion(NamedTuple):
    """Rows ``begin`` to ``end`` of tensor number ``tensor``."""

    tensor: int
    begin: int
    end: int


def portions(sizes: Sequence[Size], ranks: int) -> list[list[Portion]]:
    """Returns the portions of each rank. Every row of every tensor is in exactly one; a tensor without rows is in one,
    too.

    Tensors lie one after the other, and so do the ranks' parts of their bytes. Cuts between two ranks are moved to the
    nearest row of a large tensor, or to the nearest end of a small one.
    """
    total = sum(size.rows * size.row_bytes for size in sizes)
    found: list[list[Portion]] = [[] for _ in range(ranks)]
    offset = 0
    for number, (rows, row_bytes) in enumerate(sizes):
        nbytes = rows * row_bytes
        if nbytes < SMALL_BYTES:
            middle = offset + nbytes // 2
            found[min(middle * ranks // total, ranks - 1) if total else 0].append(Portion(number, 0, rows))
        else:
            begin = 0
            for rank in range(offset * ranks // total, ranks):
                end = min(rows, max(begin, round((total * (rank + 1) / ranks - offset) / row_bytes)))
                if rank == ranks - 1:
                    end = rows
                if end > begin:
                    found[rank].append(Portion(number, begin, end))
                    begin = end
                if begin == rows:
                    break
        offset += nbytes
    return found
