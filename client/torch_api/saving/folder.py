"""A folder of checkpoints on disk: which are there, whether they are whole, and how one comes into being.

    step_0000000100/            a checkpoint: files of torch's format, and
        bagua.json              its manifest: step, ranks, bytes and SHA-256 of each file
    writing-RUN-2-100/          one that is being written: it gets its name when it is whole
        part-3                  rank 3 has written its file
    damaged-step_0000000200/    one that could not be read, put aside

A manifest is written last, so that a folder without one is no checkpoint.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.base.checkpoint_folder import name_of
from bagua.base.disk import replace_file, sync_folder
from bagua.base.errors import BaguaError

MANIFEST = "bagua.json"
FORMAT = 1
WRITING, DAMAGED, OLD = "writing-", "damaged-", "old-"
_NAME = re.compile(r"step_(\d{10,})")


class Damaged(BaguaError):
    """A checkpoint that can't be loaded. The one before may be whole."""


@dataclass(frozen=True)
class Manifest:
    """The facts about a checkpoint. ``files``: (bytes, SHA-256 in hexadecimal digits) by name."""

    step: int
    ranks: int
    files: dict[str, tuple[int, str]]

    def text(self) -> str:
        """Returns the manifest as the text of its file."""
        document = {"format": FORMAT, "step": self.step, "ranks": self.ranks, "files": self.files}
        return json.dumps({**document, "sum": _sum_of(document)}, indent=1, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Reads the manifest. Raises Damaged."""
        try:
            document = json.loads(text)
            stated = document.pop("sum")
            if document["format"] != FORMAT:
                raise Damaged(f"its format is {document['format']}, and this version of bagua reads {FORMAT}")
            if _sum_of(document) != stated:
                raise Damaged(f"{MANIFEST} was changed")
            files = {str(name): (int(size), str(found)) for name, (size, found) in document["files"].items()}
            return cls(int(document["step"]), int(document["ranks"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{MANIFEST} can't be read: {error!r}") from None


def _sum_of(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def step_of(name: str) -> int | None:
    """Returns the step of a checkpoint by its name; None for other names."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def checkpoints(folder: Path) -> list[Path]:
    """Lists the checkpoints in a folder, the newest (with the largest step) first. Empty if there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return [folder / name for name in sorted(steps, key=lambda name: steps[name], reverse=True)]


def superfluous(steps: Iterable[int], keep: int, newest: int) -> list[int]:
    """Returns those of ``steps`` to delete when the checkpoint of step ``newest`` is there, and ``keep`` stay: the
    oldest ones. Later steps belong to an earlier run, and stay.
    """
    return sorted({step for step in steps if step <= newest}, reverse=True)[keep:]


def read_manifest(at: Path) -> Manifest:
    """Reads the manifest. Raises Damaged."""
    try:
        return Manifest.parse((at / MANIFEST).read_text())
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}: it was not written to its end") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{MANIFEST} can't be read: {error}") from None


def verify(at: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares these files with the manifest. Raises Damaged."""
    for name in names:
        size, stated = manifest.files[name]
        try:
            found = (at / name).stat().st_size
            if found != size:
                raise Damaged(f"{name} has {found} bytes instead of {size}")
            if sum_of_file(at / name) != stated:
                raise Damaged(f"the contents of {name} have changed: their SHA-256 is another one")
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except OSError as error:
            raise Damaged(f"{name} can't be read: {error}") from None


def sum_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepare(folder: Path) -> bool:
    """Makes the folder, and removes what earlier runs have left unfinished. Returns whether it has checkpoints. Raises
    OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if path.name.startswith(WRITING):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(OLD):  # a process was killed while it replaced this one by one of the same step
            if (target := folder / path.name.removeprefix(OLD)).exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(target)
    return bool(checkpoints(folder))


class Lock:
    """Lock of the process that writes into a folder. It ends with the process, however that ends."""

    def __init__(self, folder: Path, patience_s: float = 10.0) -> None:
        """Raises BlockingIOError if another process holds it, and goes on doing so for a while: one that was killed a
        moment ago may not be gone yet."""
        # The folder itself: a file would lie among the checkpoints.
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        until = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:  # a process that was killed may not be gone yet
                    self.close()
                    raise
                time.sleep(0.1)
            except OSError:  # a file system without locks
                return

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._descriptor)


def put_aside(at: Path) -> Path:
    """Renames a damaged checkpoint, so that it no longer counts. Returns its new name. Raises OSError."""
    target = at.with_name(DAMAGED + at.name)
    shutil.rmtree(target, ignore_errors=True)
    return at.rename(target)


def publish(writing: Path, folder: Path, manifest: Manifest) -> Path:
    """Makes a checkpoint of ``writing``, whose files are whole and synced. It replaces that of the same step. Raises
    OSError."""
    replace_file(writing / MANIFEST, manifest.text(), mode=0o666)  # last: a folder without a manifest is no checkpoint
    target = folder / name_of(manifest.step)
    replace_folder(writing, target, old=folder / f"{OLD}{target.name}")
    return target


def replace_folder(new: Path, target: Path, old: Path) -> None:
    """Renames ``new`` to ``target``, in place of a folder of that name, which is called ``old`` until then. Raises
    OSError."""
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)  # a process killed between the two renames leaves it behind
        target.rename(old)
    new.rename(target)
    sync_folder(target.parent)  # else a crash of the machine could find neither of them
    shutil.rmtree(old, ignore_errors=True)


def rotate(folder: Path, keep: int, newest: int) -> None:
    """Removes checkpoints that are too many. One that can't be removed stays."""
    steps = [step for path in checkpoints(folder) if (step := step_of(path.name)) is not None]
    for step in superfluous(steps, keep, newest):
        at = folder / name_of(step)
        with suppress(OSError):  # first it loses its name: nobody finds half of one
            gone = at.rename(folder / f"{WRITING}gone-{step}")
            shutil.rmtree(gone, ignore_errors=True)
