"""Checkpoints in the format of ``torch.distributed.checkpoint`` (DCP), through its public classes.

Ranks write without a process group of torch's: each one its plan and its file, and rank 0 the metadata from all plans.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

Keys = tuple[str, ...]


@dataclass
class Piece:
    """Rows of a tensor. ``path``: keys of dictionaries that lead to it. ``data``: contiguous, on the CPU, with
    memory of its own. ``offset``: the first of its rows in the whole, which has this ``size``."""

    path: Keys
    data: torch.Tensor
    offset: int
    size: torch.Size


@dataclass
class Written:
    """A rank's part in the metadata."""

    plan: SavePlan
    results: list[WriteResult]


class _Planner(DefaultSavePlanner):
    """Knows all items beforehand. Its part in the metadata says how keys are to become dictionaries again."""

    def __init__(self, pieces: Sequence[Piece], documents: Mapping[Keys, Any]) -> None:
        super().__init__()
        self._data: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self._items: list[WriteItem] = []
        self._paths: dict[str, Keys] = {}
        for path, document in documents.items():
            content = io.BytesIO()
            torch.save(document, content)
            self._add(path, WriteItem(MetadataIndex(".".join(path)), WriteItemType.BYTE_IO), content)
        for piece in pieces:
            self._add_piece(piece)

    def _add_piece(self, piece: Piece) -> None:
        # A number has no dimensions.
        offsets = torch.Size((piece.offset, *(0 for _ in piece.size[1:])) if piece.size else ())
        whole = piece.data.shape == piece.size
        item = WriteItem(
            MetadataIndex(".".join(piece.path), offsets),
            WriteItemType.TENSOR if whole else WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, piece.data.shape),
                TensorProperties.create_from_tensor(piece.data),
                piece.size,
            ),
        )
        self._add(piece.path, item, piece.data)

    def _add(self, path: Keys, item: WriteItem, data: torch.Tensor | io.BytesIO) -> None:
        self._data[item.index] = data
        self._items.append(item)
        self._paths[item.index.fqn] = path

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items, planner_data=self._paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._data[write_item.index]


def write_part(folder: Path, rank: int, pieces: Sequence[Piece], documents: Mapping[Keys, Any]) -> Written:
    """Writes the file of this rank, ``__RANK_0.distcp``. Raises OSError."""
    planner, writer = _Planner(pieces, documents), FileSystemWriter(folder)
    planner.set_up_planner({})
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The writer numbers files by the place in this list.
    plan = writer.prepare_global_plan([*(SavePlan([]) for _ in range(rank)), plan])[rank]
    results = writer.write_data(planner.finish_plan(plan), planner)
    results.wait()
    return Written(plan, list(results.value()))


def write_metadata(folder: Path, parts: Sequence[Written]) -> None:
    """Writes ``.metadata``. ``parts``: of all ranks. Raises OSError, and ValueError if they don't fit together."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan([part.plan for part in parts])
    writer.finish(metadata, [part.results for part in parts])


class _LoadPlanner(DefaultLoadPlanner):
    """Reads objects as plain data: no code in them is run."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class Checkpoint:
    """A whole one in ``folder``. Raises what damaged files lead to."""

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._metadata: Metadata = self._reader.read_metadata()

    def __contains__(self, key: str) -> bool:
        return key in self._metadata.state_dict_metadata

    def place(self, places: Sequence[Keys], like: torch.Tensor) -> str | None:
        """The key of the first of these places that has a tensor of this size; None if there is none."""
        for path in places:
            found = self._metadata.state_dict_metadata.get(".".join(path))
            if isinstance(found, TensorStorageMetadata) and found.size == like.shape:
                return ".".join(path)
        return None

    def document(self, key: str) -> Any:
        """The plain data of that key."""
        found: dict[str, Any] = {key: None}
        self._read(found)
        return found[key]

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Reads these keys into the tensors, which have the same sizes."""
        with torch.no_grad():
            self._read({name: tensor.detach() for name, tensor in tensors.items()})

    def _read(self, found: dict[str, Any]) -> None:
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # the keys are flat already
        planner.set_up_planner(found, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        plan = planner.create_global_plan([plan])[0]
        plan = planner.finish_plan(self._reader.prepare_global_plan([plan])[0])
        self._reader.read_data(plan, planner).wait()
