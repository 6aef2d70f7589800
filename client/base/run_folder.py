"""Temporary folders of this user for the state of processes, locked by their owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

from bagua.base.errors import ConfigError
from bagua.base.paths import make_private_dir, runtime_dir
from bagua.base.trees import remove_tree

KEPT_MARK = "kept"


def runtime_root() -> Path:
    """A short folder of this user (paths of Unix sockets have at most 107 bytes): see ``paths.runtime_dir``."""
    root = runtime_dir()
    if root.is_symlink():
        remedy = "Remove it; outside of Slurm and PBS you can set XDG_RUNTIME_DIR instead"
        raise ConfigError(f"{root} is a link: somebody else made it. {remedy}. [BG108]")
    return make_private_dir(root)


class RunFolder:
    """The temporary state folder of a run, locked while its owner lives. A later run removes the folder of an owner
    that was killed."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or runtime_root()
        _sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix="run-", dir=root))
        self._lock = _lock(self.path)  # at once: another run may sweep

    def remove(self) -> None:
        remove_tree(self.path)
        self._release()

    def keep(self) -> None:
        """Leaves the folder to the user: no later run removes it."""
        (self.path / KEPT_MARK).touch()
        self._release()

    def hand_on(self) -> None:
        """Leaves the lock to the program that this process becomes by exec: it holds it as long as it lives."""
        if self._lock is not None:
            os.set_inheritable(self._lock, True)  # exec closes descriptors that are not inheritable

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of ``folder``, or None while somebody else holds it."""
    # O_CLOEXEC: children must not hold the lock.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sweep(root: Path) -> None:
    """Removes what killed runs left behind. A folder just made by another run is not locked yet: a minute's grace."""
    for folder in root.glob("run-*"):
        with contextlib.suppress(OSError):
            if (folder / KEPT_MARK).exists() or time.time() - folder.stat().st_mtime < 60:
                continue
            descriptor = _lock(folder)
            if descriptor is not None:
                remove_tree(folder)  # under its lock: two runs may sweep at once
                os.close(descriptor)
