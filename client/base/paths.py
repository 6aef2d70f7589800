"""Folders of the service. State and runtime folders belong to one user and have mode 0700."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from bagua.base.errors import ConfigError

_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID")


def home() -> Path:
    """The user's home. Raises ConfigError where neither the environment nor the system says it."""
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            f"HOME is not set, and user {os.getuid()} is not in the system's list of users, so the folders of Bagua "
            "have no place. Set HOME to a folder that this user can write, or both BAGUA_CACHE_DIR and "
            "BAGUA_STATE_DIR. [BG108]"
        ) from None


def state_dir() -> Path:
    """``BAGUA_STATE_DIR``, else ``$XDG_STATE_HOME/bagua``, else ``~/.local/state/bagua``."""
    explicit = os.environ.get("BAGUA_STATE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state") / "bagua"


def cache_dir() -> Path:
    """``BAGUA_CACHE_DIR``, else ``$XDG_CACHE_HOME/bagua``, else ``~/.cache/bagua``: built cores."""
    explicit = os.environ.get("BAGUA_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "bagua"


def runtime_dir() -> Path:
    """``$XDG_RUNTIME_DIR/bagua``, else ``/tmp/bagua-UID``: a short path for Unix sockets.

    The variable counts if this user owns its folder: ``su`` passes it on to another user. In a scheduler's job it does
    not count, because that folder ends with a login.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and not any(name in os.environ for name in _SCHEDULERS):
        with contextlib.suppress(OSError):
            if os.stat(base).st_uid == os.getuid():
                return Path(base) / "bagua"
    return Path(f"/tmp/bagua-{os.getuid()}")


def make_private_dir(path: Path, remedy: str = "Give another with --state-dir or BAGUA_STATE_DIR.") -> Path:
    """Creates ``path`` with mode 0700 and returns it. Raises ConfigError, with the ``remedy``, if that can not be."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            path.chmod(0o700)
        # Not by writing: a full disk is no reason against a folder that has its files already.
        if not os.access(path, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code))
    except OSError as error:
        raise ConfigError(f"The folder {path} can't be written: {error.strerror}. {remedy} [BG108]") from error
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"The folder {path} belongs to user {status.st_uid}, not to you. Run this as that user (`runuser -u USER "
            "-- …`), or choose a folder of your own. [BG108]"
        )
    return path


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes ``path`` with that mode, all or nothing. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # two processes may write it at once
    temporary.unlink(missing_ok=True)  # left by a killed process of this id
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
