"""Other users of this machine: which of them tests can borrow, and a way for them to this interpreter.

It may lie where root alone can go (/root/.pyenv). Then the daemon under test gets a mount namespace of its own, in
which that folder is covered by one that shows the interpreter, and the cache of native code, alone.
"""

import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from bagua.base.paths import cache_dir

NAMES = ("nobody", "daemon")
"""Two users that every system has."""

_SCRIPT = """
set -e
held=$1 covered=$2 count=$3; shift 3
for number in $(seq $count); do
  mkdir "$held/$number"; mount --bind "$1" "$held/$number"; eval "path$number=\\$1"; shift
done
mount -t tmpfs -o mode=755 tmpfs "$covered"
for number in $(seq $count); do
  eval "path=\\$path$number"; mkdir -p "$path"; mount --move "$held/$number" "$path"
done
exec "$@"
"""


def users():
    """Two that are not root."""
    return [pwd.getpwnam(name) for name in NAMES]


def reason_to_skip():
    """Why ranks can't run as another user here; empty: they can."""
    if os.geteuid() != 0:
        return "needs root, who can become another user"
    try:
        other = users()[0]
    except KeyError as error:
        return str(error)
    folders = {_closed(path) for path in _needed()} - {None}
    if len(folders) > 1:
        return f"Python lies in several folders that are closed to others: {folders}"
    if not all(map(shutil.which, ("unshare", "setpriv"))):
        return "no unshare or setpriv (util-linux)"
    if not folders:
        try:
            subprocess.run([sys.executable, "-c", ""], user=other.pw_uid, cwd="/", check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"{other.pw_name} can't run this Python: {error}"
    if folders:
        made = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "true"], capture_output=True, text=True
        )
        if made.returncode:
            return f"mount namespaces can't be made here: {made.stderr.strip()}"
    return ""


def way(folder):
    """The beginning of a command in which other users can run this interpreter. ``folder``: an empty one."""
    closed = next((found for path in _needed() if (found := _closed(path)) is not None), None)
    if closed is None:
        return []
    cache_dir().mkdir(parents=True, exist_ok=True)
    shown = [str(path) for path in (*_needed(), cache_dir().resolve()) if path.is_relative_to(closed)]
    own = ["unshare", "--mount", "--propagation", "private"]
    return [*own, "sh", "-c", _SCRIPT, "way", str(folder), str(closed), str(len(shown)), *shown]


def _needed():
    places = [sys.base_prefix, sys.prefix]
    for name in ("torch", "bagua"):  # not imported: torch takes two seconds
        spec = importlib.util.find_spec(name)
        places += (spec.submodule_search_locations or ()) if spec else ()
    return {Path(place).resolve() for place in places}


def _closed(path):
    """The first folder on the way to ``path`` that other users can't enter."""
    for folder in reversed((path, *path.parents)):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None
