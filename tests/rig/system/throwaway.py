"""A copy of this machine's root file system that is thrown away (an overlay), for commands that root types: packages of
the distribution, users, files in /etc. Processes, network and devices are those of the machine."""

import os
import shutil
import subprocess
import sys

_ENTER = r"""
set -e
folder=$1; shift
mkdir -p "$folder/upper" "$folder/work" "$folder/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
for place in sys dev; do mount --rbind "/$place" "$folder/root/$place"; done
mount -t proc proc "$folder/root/proc"
cd "$folder/root"; mkdir -p old; pivot_root . old; umount -l /old
exec sh -euc "$1"
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Throwaway:
    """``folder``: on the file system of the root."""

    def __init__(self, folder):
        self.folder = folder

    def attempt(self, text, timeout_s):
        """Runs it as root, to whatever end. What it has started ends with it, and apt asks nothing."""
        own = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        return subprocess.run(
            [*own, "sh", "-c", _ENTER, "-", str(self.folder), text],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def sh(self, text, timeout_s):
        """Its output. The test fails if it does."""
        done = self.attempt(text, timeout_s)
        assert done.returncode == 0, f"{text}\n{done.stdout[-5000:]}"
        return done.stdout


def reason_to_skip(folder):
    """Why there can be no such copy here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root: an overlay over the root file system"
    if not all(map(shutil.which, ("unshare", "pivot_root", "apt-get", "runuser"))):
        return "no unshare, pivot_root, runuser or apt-get: this is written for Debian and Ubuntu"
    for place in (folder, sys.prefix, sys.base_prefix):
        if os.stat(place).st_dev != os.stat("/").st_dev:
            return f"{place} lies on another file system than the root"
    return ""
