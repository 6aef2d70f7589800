"""Copies a rank's share of a checkpoint, so that training may go on: shares of about as many bytes, and memory that is
used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from bagua.torch_api.comm.checkpoint_state import Path
from bagua.torch_api.saving.job_state import JobState
from bagua.torch_api.saving.torch_format import Piece

Key = tuple[Path, torch.Size, torch.dtype]
SMALL_BYTES = 1 << 20  # a tensor of fewer bytes is not cut: many small pieces take longer to write


class Staging:
    """Memory of one rank for the copy of its state. What the last checkpoint did not need goes back to the system."""

    def __init__(self) -> None:
        self._memory: dict[Key, torch.Tensor] = {}

    def copy_share(self, state: JobState, rank: int, ranks: int) -> list[Piece]:
        """Copies this rank's share. The share of before is overwritten."""
        used: dict[Key, torch.Tensor] = {}
        found = []
        on_device: set[torch.device] = set()
        with torch.no_grad():
            for path, tensor, begin, end in _shares(state, rank, ranks):
                rows = tensor[begin:end] if tensor.dim() else tensor
                key = path, rows.shape, rows.dtype
                memory = self._memory.get(key)
                if memory is None:
                    # Pinned: only then the copy runs beside the host.
                    memory = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=rows.is_cuda)
                memory.copy_(rows, non_blocking=True)
                used[key] = memory
                found.append(Piece(path, memory, begin, tensor.shape))
                if rows.is_cuda:
                    on_device.add(rows.device)
        for device in on_device:
            torch.cuda.synchronize(device)  # the pieces are written by another thread, which knows no stream
        self._memory = used
        return found


class Size(NamedTuple):
    """Size of a tensor: rows along its first dimension (1 if it has none), and bytes of each."""

    rows: int
    row_bytes: int


def portions(sizes: Sequence[Size], ranks: int) -> list[list[tuple[int, int, int]]]:
    """Returns the portions of each rank: (number of the tensor, first row, last row + 1). Every row of every tensor is
    in exactly one; a tensor without rows is in one, too.

    Tensors lie one after the other, and so do the ranks' parts of their bytes. Cuts between two ranks are moved to the
    nearest row of a large tensor, or to the nearest end of a small one.
    """
    total = sum(size.rows * size.row_bytes for size in sizes)
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    offset = 0
    for number, (rows, row_bytes) in enumerate(sizes):
        nbytes = rows * row_bytes
        if nbytes < SMALL_BYTES:
            middle = offset + nbytes // 2
            # A small one goes whole to the rank in whose part its middle lies.
            found[min(middle * ranks // total, ranks - 1) if total else 0].append((number, 0, rows))
        else:
            begin = 0
            for rank in range(offset * ranks // total, ranks):
                end = min(rows, max(begin, round((total * (rank + 1) / ranks - offset) / row_bytes)))
                if rank == ranks - 1:  # rounding may leave rows: the last rank takes them
                    end = rows
                if end > begin:
                    found[rank].append((number, begin, end))
                    begin = end
                if begin == rows:
                    break
        offset += nbytes
    return found


def _shares(state: JobState, rank: int, ranks: int) -> Iterator[tuple[Path, torch.Tensor, int, int]]:
    alike = list(state.alike.items())
    for number, begin, end in portions([size_of(tensor) for _, tensor in alike], ranks)[rank]:
        yield (*alike[number], begin, end)
    for path, tensor in state.mine.items():
        yield path, tensor, 0, size_of(tensor).rows


def size_of(tensor: torch.Tensor) -> Size:
    """Returns the size of a tensor in rows."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return Size(rows, tensor.numel() // rows * tensor.element_size() if rows else 0)
