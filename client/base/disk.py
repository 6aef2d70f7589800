"""Words for errors of disks and folders, and files that a power cut leaves whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # There is no room, and there may be some later
CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})  # this user may not write, or read, there


def disk_words(error: OSError, path: Path | str | None = None) -> str:
    """Says what is wrong with ``path`` (the error's own file if it is not given), without a traceback."""
    named = path if path is not None else error.filename
    place = Path(os.fsdecode(named)) if isinstance(named, str | bytes | os.PathLike) else Path.cwd()
    folder = place if os.path.isdir(place) else place.parent  # Path.is_dir raises where a folder above is closed
    match error.errno:
        case errno.ENOSPC:
            return f"The disk of {folder} is full: {place} can't be written. Make room there."
        case errno.EDQUOT:
            return f"The disk quota of user {os.getuid()} on {folder} is used up: {place} can't be written. Make room."
        case errno.EFBIG:
            return f"{place} has reached the limit of file sizes (ulimit -f). Raise it."
        case errno.EROFS:
            return f"The disk of {folder} is read-only: {place} can't be written. Mount it for writing."
        case errno.EACCES | errno.EPERM:
            return f"User {os.getuid()} may not use {place}: {error.strerror}. Give the folder {folder} to that user."
        case errno.EIO:
            return f"The disk of {folder} fails ({error.strerror}) at {place}. Look at the kernel's log."
    return f"{place} can't be used: {error.strerror or error}."


def ending_words(error: OSError) -> str:
    """Words for an error that ends a command; empty: a fault of ours, not of a file that somebody named."""
    if error.errno in FULL and error.filename is None:  # of a write: nothing says which file it was
        return (
            f"What this command writes has no room ({error.strerror}): its output, or a file that it should make. Make "
            "room there, or have it written elsewhere. [BG109]"
        )
    if error.errno in FULL or (error.errno in CLOSED and error.filename):
        return f"{disk_words(error)} [BG109]"
    return ""


def replace_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Writes a small file, of this user alone by default, so that a reader, and the next start after a power cut, finds
    the old text or the new one, never half of it. Blocks on the disk, which ``paths.write_private`` does not. Raises
    OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # before the rename: a crash must not leave a name without content
    os.replace(temporary, path)
    sync_folder(path.parent)  # the rename itself must reach the disk


def sync_folder(folder: Path) -> None:
    """Waits until the names in the folder are on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
