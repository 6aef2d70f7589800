"""Chooses the folder of the daemon's Unix sockets. A socket's path has at most 107 bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from bagua.base.errors import ConfigError
from bagua.base.paths import runtime_dir

MAX_SOCKET_PATH = 107
_LONGEST_NAME = "job-0123456789abcdef.sock"


def socket_folder(state: Path) -> Path:
    """A folder of its own in ``BAGUA_RUNTIME_DIR``; else the node's state folder itself where paths in it are short
    enough, else a folder of its own under the user's runtime folder. Made with mode 0700. Raises ConfigError if it
    can't be made or is not the user's alone."""
    explicit = os.environ.get("BAGUA_RUNTIME_DIR")
    if not explicit and len(os.fsencode(state / _LONGEST_NAME)) <= MAX_SOCKET_PATH:
        return state
    root = Path(explicit) if explicit else runtime_dir()
    folder = root / hashlib.sha256(os.fsencode(state.absolute())).hexdigest()[:8]
    if len(os.fsencode(folder / _LONGEST_NAME)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"No place for sockets: {state} and {folder} are too long. Choose a shorter --state-dir. [BG108]"
        )
    for path in (root, folder):
        _make_own(path)
    return folder


def leave_socket_folder(folder: Path, state: Path) -> None:
    """Removes the sockets of engines, and the folder if it is not the state folder itself."""
    remove_sockets(folder)
    if folder != state:
        with contextlib.suppress(OSError):
            folder.rmdir()


def remove_sockets(folder: Path, job: str = "job-*") -> None:
    """Removes the sockets of engines: of all, or of the one whose socket is named ``job`` without its suffix; and what
    ranks put beside them to meet (see bagua.torch_api.job.torch_distributed). What can't be removed, from a disk that
    has become read-only, is in nobody's way: the next start removes it."""
    for pattern in (f"{job}.sock", f"{job}.torch-*"):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def data_socket(folder: Path, job_id: str, generation: int) -> Path:
    """Path of the core's socket of one generation of a job."""
    name = hashlib.sha256(f"{job_id}/{generation}".encode()).hexdigest()[:16]
    return folder / f"job-{name}.sock"


def _make_own(path: Path) -> None:
    """Makes a folder that is ours, no link, with mode 0700: /tmp is everybody's."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(
                f"{path} is not a folder of yours: somebody else made it. "
                "Set XDG_RUNTIME_DIR or choose a shorter --state-dir. [BG108]"
            )
        if status.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"The folder {path} for sockets can't be made: {error.strerror}. [BG108]") from error
