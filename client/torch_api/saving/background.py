"""Writes checkpoints beside the training: each rank its part, and rank 0 makes a checkpoint of all parts.

Ranks send each other nothing for it: who has written its part leaves a small file in the folder, which all ranks see.
So a rank that is lost, or can't write, holds nobody up. Rank 0 gives that checkpoint up, says why, and the training
goes on.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.base.errors import BaguaError
from bagua.torch_api.saving import folder as on_disk
from bagua.torch_api.saving.torch_format import Piece, Written, write_metadata, write_part

LOG = logging.getLogger("bagua")
PATIENCE_S = 600.0  # so long rank 0 waits for the next part
LAST_PATIENCE_S = 60.0  # the same when its process is about to end
LOOK_EVERY_S = 0.05
TELL_AFTER_S = 30.0


class GivenUp(BaguaError):
    """A checkpoint that will not be whole."""


@dataclass(frozen=True)
class Task:
    """Part of one rank in one checkpoint. ``members``: numbers of all members, in the order of ranks. ``present``:
    those that there are now.
    """

    folder: Path
    run: str
    generation: int
    step: int
    rank: int
    members: tuple[int, ...]
    present: Callable[[], Sequence[int]]
    keep: int

    @property
    def writing(self) -> Path:
        """Folder in which it is written. Members of another generation, and other runs, have other folders."""
        return self.folder / f"{on_disk.WRITING}{self.run}-{self.generation}-{self.step}"


@dataclass(frozen=True)
class Part:
    """The sign that a rank leaves for rank 0. ``size``, ``sum``: of its file."""

    written: Written
    name: str
    size: int
    sum: str


class Background:
    """Writes of this rank, one after the other."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._written = threading.Event()  # memory of the last task may be used again
        self._written.set()
        self._ends = threading.Event()
        self._lock = threading.Lock()  # guards the count
        self.failed = 0

    def wait_until_written(self) -> None:
        """Waits until this rank's part of the last checkpoint is on the disk, or has failed."""
        while not self._written.wait(TELL_AFTER_S):
            LOG.warning(
                "The training waits for the disk: this rank's share of the last checkpoint is not written after %.0f s "
                "more. Write checkpoints less often, or into a faster folder.",
                TELL_AFTER_S,
            )

    def start_writing(self, task: Task, pieces: Sequence[Piece], documents: Mapping[Any, Any]) -> None:
        """Writes in a thread of its own. Call it after ``wait_until_written`` has returned. Pieces must stay as they
        are until that returns again.
        """
        self._written.clear()
        self._threads = [one for one in self._threads if one.is_alive()]
        before = self._threads[-1] if self._threads else None
        arguments = task, pieces, documents, before
        # Daemon: a process that ends by an error does not wait for a disk.
        thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Waits for all that is being written."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(
        self, task: Task, pieces: Sequence[Piece], documents: Mapping[Any, Any], before: threading.Thread | None
    ) -> None:
        try:
            try:
                self._write_part(task, pieces, documents)
            finally:
                self._written.set()  # the staging memory is free: the next copy may begin
            if task.rank == 0:
                if before is not None:
                    before.join()  # older checkpoints come first, and are given up when a rank has gone past them
                parts = self._await_parts(task)
                finish(task, parts)
                LOG.info("Checkpoint of step %d is in %s.", task.step, task.folder)
        except Exception as error:  # a full disk, say: the training goes on
            with self._lock:
                self.failed += 1
            LOG.warning(
                "There is no checkpoint of step %d in %s: %s Training goes on, and the next one is written when it is "
                "due.",
                task.step,
                task.folder,
                sentence(error),
            )
            with suppress(OSError):
                # Rank 0 reads why, and waits no longer.
                (task.writing / f"failed-{task.rank}").write_text(sentence(error))
            if task.rank == 0:
                shutil.rmtree(task.writing, ignore_errors=True)

    def _write_part(self, task: Task, pieces: Sequence[Piece], documents: Mapping[Any, Any]) -> None:
        task.writing.mkdir(parents=True, exist_ok=True)  # whichever rank comes first makes it
        written = write_part(task.writing, task.rank, pieces, documents)
        name = f"__{task.rank}_0.distcp"
        path = task.writing / name
        part = Part(written, name, path.stat().st_size, on_disk.sum_of_file(path))
        new = task.writing / f"new-part-{task.rank}"
        new.write_bytes(pickle.dumps(part))
        new.rename(part_file(task.writing, task.rank))  # renamed when it is whole: rank 0 reads no half of one

    def _await_parts(self, task: Task) -> list[Part]:
        """Raises GivenUp if one will not come."""
        missing = list(range(len(task.members)))
        since = time.monotonic()
        while True:
            left = [rank for rank in missing if not part_file(task.writing, rank).exists()]
            if left != missing:
                missing, since = left, time.monotonic()
            if not missing:  # a part has come: the patience begins anew
                return [pickle.loads(part_file(task.writing, rank).read_bytes()) for rank in range(len(task.members))]
            why_not(task, missing)
            patience = LAST_PATIENCE_S if self._ends.is_set() else PATIENCE_S
            if time.monotonic() - since > patience:
                raise GivenUp(
                    f"{ranks_text(missing)} wrote nothing into {task.writing} in {patience:.0f} s. Is it the same "
                    "folder on all hosts?"
                )
            time.sleep(LOOK_EVERY_S)


def written_by(task: Task) -> list[Path]:
    """Lists all checkpoints that this run is writing now."""
    return list(task.folder.glob(f"{on_disk.WRITING}{task.run}-*-*"))


def step_of(writing: Path) -> int:
    """Returns the step of a checkpoint that is being written."""
    return int(writing.name.rpartition("-")[2])


def part_file(writing: Path, rank: int) -> Path:
    """Returns the file that exists once the rank's part is whole."""
    return writing / f"part-{rank}"


def why_not(task: Task, missing: Sequence[int]) -> None:
    """Raises GivenUp if a part that is missing will not come: its rank failed, was lost, or has written a later one."""
    for rank in missing:
        with suppress(FileNotFoundError):
            raise GivenUp(f"rank {rank}: {(task.writing / f'failed-{rank}').read_text()}")
    present = task.present()
    lost = [rank for rank in missing if task.members[rank] not in present]
    # A part may have come since ``missing`` was made.
    if lost and not any(part_file(task.writing, rank).exists() for rank in lost):
        raise GivenUp(f"{ranks_text(lost)} was lost before its part was written.")
    later = [path for path in written_by(task) if step_of(path) > task.step]
    for rank in missing:
        # Asked again, as above.
        if any(part_file(path, rank).exists() for path in later) and not part_file(task.writing, rank).exists():
            raise GivenUp(f"rank {rank} could not write its part.")


def finish(task: Task, parts: Sequence[Part]) -> None:
    """Makes a checkpoint of all parts. Raises OSError."""
    write_metadata(task.writing, [part.written for part in parts])
    files = {part.name: (part.size, part.sum) for part in parts}
    metadata = task.writing / ".metadata"
    files[metadata.name] = metadata.stat().st_size, on_disk.sum_of_file(metadata)
    for path in task.writing.iterdir():
        if path.name not in files:  # signs of ranks are no part of it
            path.unlink()
    on_disk.publish(task.writing, task.folder, on_disk.Manifest(task.step, len(parts), files))
    on_disk.rotate(task.folder, task.keep, task.step)
    for path in written_by(task):
        if step_of(path) < task.step:  # given up by a rank 0 that is gone
            shutil.rmtree(path, ignore_errors=True)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 3, 4``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def sentence(error: Exception) -> str:
    """Returns the error's words, with a full stop, or the code of an error of ours."""
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error) or repr(error)
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    words = f"{text}{where}"
    return words if words.endswith("]") else words.rstrip(".") + "."
