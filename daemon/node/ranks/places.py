"""Folders in which the ranks of a job meet the daemon and find their code.

Ranks that run as the daemon's user share the folder of its sockets. Where each job has a user of its own, each has a
folder of its own, which root owns and others can only pass through: a socket in it is that user's, and nobody can put
another in its place. Code and what ranks put there to meet lie in folders of the user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.base.errors import ConfigError
from bagua.daemon.node.ranks.runtime_dir import remove_sockets
from bagua.daemon.node.ranks.user import RankUser

_PASS = 0o711  # others pass through, and can't list what is there
_GONE = ".gone-"


@dataclass(frozen=True)
class RankPlace:
    """Places for ranks of one job. ``folder``: of its sockets. ``code``: where its code is unpacked. ``meeting``: where
    ranks put files to meet, None: beside the sockets. ``cache``: native code of the daemon's that ranks may read, None:
    all of it.
    """

    folder: Path
    rank_socket: Path
    code: Path
    meeting: Path | None = None
    cache: Path | None = None

    def make(self, user: RankUser) -> None:
        """Makes the folders. Raises OSError."""
        assert self.meeting is not None
        self.folder.mkdir(mode=_PASS, exist_ok=True)
        self.folder.chmod(_PASS)  # whatever the umask is
        if not self.meeting.is_dir():  # else of the daemon's last life
            self.meeting.mkdir(mode=0o700)
            os.chown(self.meeting, user.uid, user.gid)

    def publish(self, built: Sequence[Path]) -> list[Path]:
        """Copies of native code, each in <kind>/<key>/<file>, where all users can read them. Blocks. Raises OSError."""
        assert self.cache is not None
        found = []
        for path in built:
            target = self.cache.joinpath(*path.parts[-3:])
            found.append(target)
            if target.is_file():
                continue
            for folder in (self.cache, target.parent.parent, target.parent):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o755)
            # Another job may copy the same at once.
            fresh = target.with_name(f".{target.name}.{threading.get_native_id()}")
            shutil.copyfile(path, fresh)
            fresh.chmod(0o755)
            fresh.replace(target)  # at once: a rank must not load half of it
        return found

    @property
    def variables(self) -> dict[str, str]:
        """Variables by which ranks find what is not where it usually is."""
        found = {"BAGUA_MEETING_DIR": self.meeting, "BAGUA_SHARED_CACHE_DIR": self.cache}
        return {name: str(path) for name, path in found.items() if path is not None}


class OwnPlaces:
    """Ranks are the daemon's user's."""

    def __init__(self, sockets: Path, jobs: Path) -> None:
        self.rank_socket = sockets / "rank.sock"
        self._sockets = sockets
        self._jobs = jobs

    def of(self, job_id: str) -> RankPlace:
        """Returns the place where the ranks of that job meet."""
        return RankPlace(self._sockets, self.rank_socket, self._jobs / job_id / "code")

    def recover(self, resumed: Collection[str]) -> list[Path]:
        """Removes sockets that an earlier life of the daemon left; returns trees to remove."""
        remove_sockets(self._sockets)
        return []

    def leave(self, job_id: str) -> list[Path]:
        """Ends the place of a job that has ended; returns trees to remove."""
        code = self.of(job_id).code
        return [_aside(code), *code.parent.glob(f"{_GONE}*")]


class UserPlaces:
    """Places of ranks if each job has a user of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cache = root / "cache"

    def of(self, job_id: str) -> RankPlace:
        """Returns the place where the ranks of that job meet."""
        folder = self._root / job_id
        return RankPlace(folder, folder / "rank.sock", folder / "code", folder / "meeting", self._cache)

    def recover(self, resumed: Collection[str]) -> list[Path]:
        """Ends what an earlier life of the daemon left, but for files of jobs that go on; returns trees to remove."""
        gone = []
        for folder in self._root.iterdir():
            if folder.name in resumed:
                remove_sockets(folder)
            elif folder != self._cache:
                gone.append(_aside(folder))
        return gone

    def leave(self, job_id: str) -> list[Path]:
        """Ends the place of a job that has ended; returns trees to remove."""
        return [_aside(self._root / job_id)]


Places = OwnPlaces | UserPlaces


def _aside(path: Path) -> Path:
    """Renames what is to be removed: the job may begin here again meanwhile, or where that fails."""
    gone = path.with_name(f"{_GONE}{path.name}-{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        return path.rename(gone)
    return path


def open_user_places(folder: Path, state: Path) -> UserPlaces:
    """A folder of this node's own in ``folder``; makes both. Raises ConfigError if they are not root's alone, or other
    users can't pass through."""
    root = folder / hashlib.sha256(os.fsencode(state.absolute())).hexdigest()[:8]
    try:
        folder.mkdir(mode=_PASS, parents=True, exist_ok=True)
        for path in (folder, root):
            path.mkdir(mode=_PASS, exist_ok=True)
            status = path.lstat()  # not stat(): a link may lead anywhere
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise ConfigError(f"--rank-dir: {path} is not a folder of root's: somebody else made it. [BG906]")
            path.chmod(_PASS)
        for path in folder.absolute().parents:
            if not path.stat().st_mode & stat.S_IXOTH:
                raise ConfigError(
                    f"--rank-dir {folder}: ranks of other users can't pass through {path}. Choose another folder. "
                    "[BG906]"
                )
    except OSError as error:
        raise ConfigError(f"--rank-dir {folder} can't be used: {error.strerror} ({error.filename}). [BG906]") from error
    return UserPlaces(root)
