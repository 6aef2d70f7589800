"""Folders that programs of users have filled: of any depth, and with whatever permissions."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

LOG = logging.getLogger("bagua")
_OCTAL = re.compile(r"\\(\d{3})")  # blanks in /proc
REMOVAL_S = 60.0
"""Longest time that one removal takes; the rest is left to the next one."""


def remove_tree(path: Path) -> None:
    """Removes a file, or a folder with all that is in it; nothing if it is not there. A tree that resists is a line in
    the log, and no error. What is mounted in it is not ours to remove, so then all of it stays.

    `rm` does it, in a child and without recursion: shutil.rmtree fails at 1,000 folders in each other.
    """
    # A folder without permissions keeps rm out: it gets them, and rm tries again.
    remove, allow = ["rm", "-rf"], ["chmod", "-R", "u+rwX"]
    for command in [remove, allow, remove] if os.geteuid() else [remove]:  # root needs no permission
        if not os.path.lexists(path) or _mounted_in(path):
            break
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*command, "--", path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=REMOVAL_S,
            )
    if os.path.lexists(path):
        LOG.warning("%s could not be removed, or not all that is in it: remove it by hand.", path)


def remove_trees(paths: Iterable[Path]) -> None:
    """Removes one after the other."""
    for path in paths:
        remove_tree(path)


def _mounted_in(path: Path) -> bool:
    """True if a file system, or a folder of another place, is mounted below ``path``."""
    below = f"{os.path.realpath(path)}/"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # another system
        return False
    places = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), line.split()[4]) for line in lines)
    return any(place.startswith(below) for place in places)


def walk_files(folder: Path, most: int) -> Iterator[os.DirEntry[str]]:
    """Yields what lies in ``folder``, at any depth that paths can name, but no more than ``most``. Leaves out folders
    that can't be read, and does not follow links."""
    folders, count = [os.fspath(folder)], 0
    while folders:  # one by one: no recursion at any depth
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as found:
            for entry in found:
                count += 1
                if count > most:
                    return
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                yield entry
