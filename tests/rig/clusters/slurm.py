"""A Slurm of its own: munged, slurmctld, and two slurmd, the "nodes" 127.0.0.1 and 127.0.0.2 of this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rig.limits import SOON_S
from rig.ports import free_ports
from rig.programs import find

PREFIX = "BAGUA_TEST_SLURM"
"""A command that runs programs where those of Slurm are, with this file system, such as ``ssh login``."""
NODES = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")


@dataclass
class Slurm:
    """How to call Slurm. ``address``: by which nodes reach the first one, if that is not found out. ``own``: a cluster
    that was made here, whose nodes may be harmed."""

    prefix: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    address: str = ""
    own: _Cluster | None = None

    def command(self, *words):
        return [*self.prefix, *words]


@contextlib.contextmanager
def slurm():
    """A cluster of two nodes: that of BAGUA_TEST_SLURM or SLURM_CONF, else one made here. Skips where there is none."""
    if os.environ.get(PREFIX):
        yield Slurm(shlex.split(os.environ[PREFIX]))
        return
    if os.environ.get("SLURM_CONF"):
        yield Slurm()
        return
    missing = [name for name in PROGRAMS if not find(name)]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} not found" if missing else "a cluster is made by root"
        pytest.skip(f"no Slurm: {why} (Debian: slurmctld, slurmd, slurm-client, munge), and {PREFIX} is not set")
    folder = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))
    folder.chmod(0o755)  # munged wants to serve others
    cluster = _Cluster(folder)
    try:
        cluster.start()
        yield Slurm(env=cluster.env, address="127.0.0.1", own=cluster)
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


class _Cluster:
    """Three kinds of daemons in the foreground, below one folder."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.processes = []

    def start(self):
        """Skips if a daemon does not start on this machine."""
        folder, host = self.folder, socket.gethostname().split(".")[0]
        for name in ("state", "run"):
            (folder / name).mkdir(mode=0o755)
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        ports = free_ports(3)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "slurm.conf").write_text(_settings(folder, host, ports))
        munge = {"key-file": key, "socket": folder / "run" / "munge", "pid-file": folder / "munged.pid"}
        more = {"log-file": folder / "munged.log", "seed-file": folder / "seed"}
        self._run(
            "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in {**munge, **more}.items())
        )
        self._wait_for((folder / "run" / "munge").exists)
        self._run("slurmctld", "-D")
        for node in NODES:
            self._run("slurmd", "-D", "-N", node)
        self._wait_for(lambda: self._states() == ["idle", "idle"])

    def lose_the_second_node(self, processes):
        """Kills its slurmd, these processes of jobs there, and the slurmstepd above them; then Slurm is told."""
        above = {_parent(pid) for pid in processes}
        steps = {pid for pid in above if _name(pid).startswith("slurmstepd")}
        slurmd = self.processes.pop()
        slurmd.kill()
        slurmd.wait()
        for pid in (*steps, *processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.call("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=lost")

    def recover(self):
        """Ends all jobs, and brings the second node back."""
        self.call("scancel", "--user=root")
        if len(self.processes) < 2 + len(NODES):
            self._run("slurmd", "-D", "-N", NODES[1])
        if any(state.startswith(("down", "drain")) for state in self._states()):
            self.call("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
        self._wait_for(lambda: self._states() == ["idle", "idle"])

    def call(self, *words):
        """Runs one of Slurm's commands; what it printed."""
        env = {**os.environ, **self.env}
        command = [find(words[0]), *words[1:]]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=SOON_S).stdout

    def _run(self, name, *arguments):
        env = {**os.environ, **self.env}
        with (self.folder / f"{name}.out").open("ab") as output:
            self.processes.append(
                subprocess.Popen(
                    [find(name), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env
                )
            )

    def _states(self):
        return self.call("sinfo", "-h", "-N", "-p", "p", "-o", "%T").split()

    def _wait_for(self, ready):
        deadline = time.monotonic() + 2 * SOON_S
        while not ready():
            words = " ".join(path.read_text()[-300:] for path in self.folder.glob("*.out"))
            if any(process.poll() is not None for process in self.processes):
                pytest.skip(f"this machine's Slurm does not start: {words}")
            assert time.monotonic() < deadline, words
            time.sleep(0.1)

    def stop(self):
        """The last first: slurmd ends what it runs."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _parent(pid):
    with contextlib.suppress(OSError):
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _name(pid):
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "comm").read_text()
    return ""


def _settings(folder, host, ports):
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder / 'run' / 'munge'}",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd-%n.pid",
        # As clusters with proctrack/cgroup do, it sends SIGTERM to tasks, and not to all that they have started.
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "KillWait": 30,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 Port={port}"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    lines += ["PartitionName=p Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1"]
    lines += ["PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10"]
    return "\n".join([*lines, ""])
