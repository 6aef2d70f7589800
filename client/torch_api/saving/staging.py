"""Memory into which a rank copies its share of a checkpoint, so that training may go on. It is used again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from bagua.torch_api.comm.checkpoint_state import Path
from bagua.torch_api.saving.job_state import JobState
from bagua.torch_api.saving.split import Size, portions
from bagua.torch_api.saving.torch_format import Piece

Key = tuple[Path, torch.Size, torch.dtype]


class Staging:
    """Memory of one rank for the copy of its state. What the last checkpoint did not need goes back to the system."""

    def __init__(self) -> None:
        self._memory: dict[Key, torch.Tensor] = {}

    def take(self, state: JobState, rank: int, ranks: int) -> list[Piece]:
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
                    memory = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=rows.is_cuda)
                memory.copy_(rows, non_blocking=True)
                used[key] = memory
                found.append(Piece(path, memory, begin, tensor.shape))
                if rows.is_cuda:
                    on_device.add(rows.device)
        for device in on_device:
            torch.cuda.synchronize(device)
        self._memory = used
        return found


def _shares(state: JobState, rank: int, ranks: int) -> Iterator[tuple[Path, torch.Tensor, int, int]]:
    alike = list(state.alike.items())
    for number, begin, end in portions([size_of(tensor) for _, tensor in alike], ranks)[rank]:
        path, tensor = alike[number]
        yield path, tensor, begin, end
    yield from _whole(state.mine.items())


def _whole(tensors: Iterable[tuple[Path, torch.Tensor]]) -> Iterator[tuple[Path, torch.Tensor, int, int]]:
    for path, tensor in tensors:
        yield path, tensor, 0, size_of(tensor).rows


def size_of(tensor: torch.Tensor) -> Size:
    """Returns the size of a tensor in rows."""
    rows = tensor.shape[0] if tensor.dim() else 1
    return Size(rows, tensor.numel() // rows * tensor.element_size() if rows else 0)
