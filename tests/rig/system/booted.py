"""This machine's system once more, started by its systemd: process 1 of name spaces of its own, on a throw-away copy of
the root file system (an overlay). Services of the machine are not started there, and the network is loopback alone."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rig.limits import SOON_S

CGROUPS = Path("/sys/fs/cgroup")
TREES = ("systemd", "unified")
"""Of a machine with both kinds of control groups. No controllers are in them, so nothing of the machine is limited."""
INIT = "/sbin/init"

_BOOT = r"""
set -e
folder=$1 root=$1/root
mkdir "$folder/layers" "$root"; touch "$folder/console"
mount --make-rprivate /
ip link set lo up
mount -t tmpfs tmpfs "$folder/layers"; mkdir "$folder/layers/upper" "$folder/layers/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/layers/upper,workdir=$folder/layers/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
mkdir "$root/sys/fs/cgroup/systemd" "$root/sys/fs/cgroup/unified"
mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
touch "$root/dev/console"; mount --bind "$folder/console" "$root/dev/console"
ln -s /proc/self/fd "$root/dev/fd"; mkdir "$root/dev/shm" "$root/dev/pts"; mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"; ln -s pts/ptmx "$root/dev/ptmx"
for place in run tmp; do mount -t tmpfs tmpfs "$root/$place"; done
mkdir "$root/old"; cd "$root"; pivot_root . old; umount -l /old
chmod 755 /root
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n' > /etc/systemd/system/trial.target
exec env -i container=other PATH="$PATH" /sbin/init --system --unit=trial.target
"""
_SPACES = ("--mount", "--pid", "--uts", "--ipc", "--cgroup", "--net")


class Booted:
    """A system that runs. ``pid``: of its process 1, as the machine sees it."""

    def __init__(self, pid):
        self.pid = pid
        self._enter = ["nsenter", "-t", str(pid), "-m", "-p", "-u", "-i", "-n", "-C", "-r", "-w", "env", "-i"]
        self._enter += ["HOME=/root", f"PATH={os.environ['PATH']}"]

    def sh(self, text):
        """Runs it as root; its output. The test fails if it does."""
        done = self.attempt(text)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def attempt(self, text):
        """Runs it as root, to whatever end."""
        words = [*self._enter, "sh", "-euc", text]
        return subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=5 * SOON_S, check=False
        )


def reason_to_skip():
    """Why no systemd can be started here; empty: it may be."""
    if os.geteuid() != 0:
        return "needs root: name spaces, an overlay"
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "systemctl"))) or not os.path.exists(INIT):
        return "systemd or util-linux are not installed (Debian: apt-get install systemd systemd-sysv)"
    if not all((CGROUPS / tree / "cgroup.procs").exists() for tree in TREES):
        return f"no control groups at {CGROUPS}/systemd and {CGROUPS}/unified"
    if len({os.stat(path).st_dev for path in ("/", sys.prefix, sys.base_prefix)}) > 1:
        return "this Python lies on another file system than the root"
    return ""


@contextmanager
def booted(folder):
    name = f"bagua-trial-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    groups = [CGROUPS / tree / name for tree in TREES]
    for group in groups:
        group.mkdir()
    join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    spaces = ["unshare", *_SPACES, "--fork", "--kill-child"]
    words = ["sh", "-ec", f'{join}exec "$@"', "-", *spaces, "sh", "-c", _BOOT, "-", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield Booted(_init(process, groups[0]))
    finally:
        process.kill()
        process.communicate(timeout=SOON_S)
        for group in groups:
            _remove(group)


def _init(process, group):
    """The process 1 of a system that has come up. The test is skipped where none does."""
    give_up = time.monotonic() + 2 * SOON_S
    while time.monotonic() < give_up and process.poll() is None:
        for pid in _inits(group):
            if "running" in Booted(pid).attempt("systemctl is-system-running || true").stdout:
                return pid
        time.sleep(0.2)
    if process.poll() is None:
        pytest.skip("no systemd comes up in name spaces here")
    pytest.skip(f"no systemd can be started in name spaces here: {process.communicate()[0]}")


def _inits(group):
    """Processes of the group that are systemd by now."""
    for path in group.rglob("cgroup.procs"):
        for pid in path.read_text().split():
            with suppress(OSError):  # it has ended
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(INIT.encode() + b"\0"):
                    yield int(pid)


def _remove(group):
    """Its processes have been killed, but may still be about to go."""
    give_up = time.monotonic() + SOON_S
    while group.exists() and time.monotonic() < give_up:
        for path in sorted(group.rglob("*"), reverse=True):
            if path.is_dir():
                with suppress(OSError):
                    path.rmdir()
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.05)
