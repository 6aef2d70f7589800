"""The coordinator's state folder: a lock, a lasting identity, and the published address."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from pathlib import Path

from bagua.base.disk import disk_words, replace_file
from bagua.base.errors import ConfigError
from bagua.base.paths import make_private_dir

DATABASE = "bagua.db"
_IDENTITY = re.compile(r"coordinator-[0-9a-f]{16}")


class StateFolder:
    """``<state>/coordinator``, locked. Raises ConfigError if another process has it or it can't be written."""

    def __init__(self, state_dir: Path) -> None:
        make_private_dir(state_dir)
        self.path = make_private_dir(state_dir / "coordinator")
        lock = self.path / "lock"
        try:
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{disk_words(error)} [BG108]") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"Another coordinator (process {pid}) uses the state folder {state_dir}. Stop it, or give this one "
                "another folder with --state-dir. [BG819]"
            ) from error
        with contextlib.suppress(OSError):  # the number is for people; the lock holds without it
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    @property
    def database(self) -> Path:
        """Path of SQLite's file."""
        return self.path / DATABASE

    def identity(self) -> str:
        """The name of this coordinator in leases: the same after a restart, so that it takes its own back at once. A
        damaged file gets a new one: what leases there were expire. Raises ConfigError."""
        path = self.path / "id"
        try:
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                found = path.read_text("ascii").strip()
                if _IDENTITY.fullmatch(found):
                    return found
            made = f"coordinator-{secrets.token_hex(8)}"
            replace_file(path, made)
        except OSError as error:
            raise ConfigError(f"{disk_words(error, path)} [BG108]") from error
        return made

    def publish(self, **what: object) -> None:
        """Writes coordinator.json: how clients on this machine find the service. Raises ConfigError."""
        path = self.path / "coordinator.json"
        try:
            replace_file(path, json.dumps({**what, "pid": os.getpid()}))
        except OSError as error:
            raise ConfigError(f"{disk_words(error, path)} [BG108]") from error

    def close(self) -> None:
        """Unlocks the folder for other processes."""
        (self.path / "coordinator.json").unlink(missing_ok=True)  # before the lock goes: the next one's must stay
        os.close(self._lock)
