"""Progress of a build, whichever process makes it: seen from the objects in its folder, and told on standard error."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 2.0  # Nothing is told of what takes no longer
LINE_S = 1.0
LOG_S = 10.0  # seconds between two words on a terminal, where they take each other's place, and in a log


@dataclass(frozen=True)
class Progress:
    """A build of ``total`` units that leave their objects in ``folder``."""

    what: str
    folder: Path
    total: int

    @property
    def under_way(self) -> bool:
        """True if a process builds, or one that did was killed."""
        return self.folder.is_dir()

    def files(self) -> str:
        """Returns words as in "3 of 9 files"; "0 of 9 files" also if nobody builds."""
        try:
            done = sum(path.suffix == ".o" for path in self.folder.iterdir())
        except OSError:
            done = 0
        return f"{min(done, self.total)} of {self.total} files"

    def words(self, seconds: float) -> str:
        """Describes the progress in one line."""
        return f"compiling the {self.what}, once for this machine: {self.files()}, {seconds:.0f} s"


@contextmanager
def told(progress: Progress) -> Iterator[None]:
    """Tells on standard error how far it is, while the block lasts: one process of all those that wait for it does."""
    ended = threading.Event()
    # A daemon: it delays no exit.
    teller = threading.Thread(target=_tell, args=(progress, ended), daemon=True, name="build progress")
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _tell(progress: Progress, ended: threading.Event) -> None:
    begin = time.monotonic()
    if ended.wait(PATIENCE_S):
        return
    try:
        only = os.open(progress.folder.with_suffix(".told"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # the build has the same trouble, and says so
    try:
        fcntl.flock(only, fcntl.LOCK_EX | fcntl.LOCK_NB)
        terminal = sys.stderr.isatty()
        while True:
            words = f"bagua: {progress.words(time.monotonic() - begin)}"
            print(f"\r{words}\x1b[K" if terminal else words, end="" if terminal else "\n", file=sys.stderr, flush=True)
            if ended.wait(LINE_S if terminal else LOG_S):
                break
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    except BlockingIOError:
        pass  # another process tells
    finally:
        os.close(only)
