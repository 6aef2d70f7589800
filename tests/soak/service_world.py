"""The service that ``service.py`` troubles: its processes, its faults, and what callers were told."""

import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

from rig.peer_relay import Relay
from rig.ports import free_port

from bagua.base.child_service import ServiceProcess
from bagua.base.errors import NotFoundError
from bagua.client import Client
from bagua.proto import common_pb2

READY_S = 600.0
"""A hang. In the idle scheduling class, at a load of 47 on two cores, a coordinator was not ready after 120 s."""
NODES = ("a", "b")
SLOTS = 4
# A coordinator whose wall clock is that of a file, in seconds beside the machine's.
_LAUNCH = """
import os, runpy, sys, time
real, path = time.time, os.environ["SOAK_CLOCK"]
def shifted():
    with open(path) as file:
        return real() + float(file.read() or 0)
time.time = shifted
sys.argv[0] = "coordinator"
runpy.run_module("bagua.daemon.coordinator", run_name="__main__", alter_sys=True)
"""
_JOB = 'echo "$KEY" >> "$MARKS/$KEY"; head -c 20000 /dev/zero | tr "\\0" x; sleep "$SECONDS_"; exit "$CODE"'


class World:
    """``jobs``: key -> id of each job that was acknowledged; ``codes``: key -> exit code of its ranks; ``cancelled``:
    ids that somebody asked to cancel; ``troubles``: what was seen to be wrong on the way."""

    ENDED = (common_pb2.JOB_STATE_SUCCEEDED, common_pb2.JOB_STATE_FAILED, common_pb2.JOB_STATE_CANCELLED)

    def __init__(self, folder):
        self.folder = folder
        self.state, self.marks = folder / "state", folder / "marks"
        self.jobs = {}
        self.codes = {}
        self.cancelled = set()
        self.troubles = []
        self._clock = folder / "clock"
        self._clock.write_text("0")
        self.marks.mkdir()
        (folder / "clocked.py").write_text(_LAUNCH)
        self._address = f"127.0.0.1:{free_port()}"
        self._lock = threading.Lock()
        self.coordinator = self._start_coordinator()
        self.relay = Relay(self._address)
        self.token = (self.state / "token").read_text()
        self.daemons = {name: self._start_daemon(name) for name in NODES}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for process in (*self.daemons.values(), self.coordinator):
            if process.poll() is None:
                process.terminate()
        for process in (*self.daemons.values(), self.coordinator):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
        self.relay.close()

    @property
    def database(self):
        return self.state / "coordinator" / "bagua.db"

    def client(self):
        return Client(self._address, token=self.token, timeout_s=20.0)

    def pids(self):
        """The processes that must not grow."""
        found = {"coordinator": self.coordinator.pid}
        for name, process in self.daemons.items():
            found[f"keeper {name}"] = process.pid
            if daemon := self._daemon_below(process.pid):
                found[f"daemon {name}"] = daemon
        return found

    # ---- what callers do

    def intend(self, key, code):
        """A job with this key is about to be submitted."""
        self.codes[key] = code

    def submit(self, key, code, seconds):
        """Raises ServiceError."""
        spec = common_pb2.JobSpec(
            name="soak",
            entry="/bin/sh",
            args=["-c", _JOB],
            no_python=True,
            nnodes=1,
            nproc_per_node=1,
            env={"KEY": key, "MARKS": str(self.marks), "SECONDS_": str(seconds), "CODE": str(code)},
            placement_timeout_s=3600.0,
            stop_grace_s=1.0,
        )
        with self.client() as client:
            job_id = client.submit(spec, idempotency_key=key).job_id
        if self.jobs.setdefault(key, job_id) != job_id:
            self.troubles.append(f"{key} was acknowledged as {self.jobs[key]} and as {job_id}")

    def cancel(self, job_id):
        """Raises ServiceError."""
        self.cancelled.add(job_id)  # whatever comes of it
        with self.client() as client:
            try:
                client.cancel(job_id)
            except NotFoundError:
                self.troubles.append(f"{job_id} was acknowledged, and is not known")

    # ---- faults

    def kill_coordinator(self, seconds):
        self.coordinator.kill()
        self.coordinator.wait()
        time.sleep(seconds / 4)
        self.need_coordinator()

    def stop_coordinator(self, seconds):
        """It, and its monotonic clock, seem to jump forward."""
        self.coordinator.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.coordinator.send_signal(signal.SIGCONT)

    def jump_clock(self, seconds):
        """The date of the coordinator jumps by days, forward and back."""
        now = float(self._clock.read_text() or 0)
        new = 0.0 if now else (seconds - 2.0) * 5 * 86_400
        temporary = self._clock.with_suffix(".new")
        temporary.write_text(str(new))
        temporary.replace(self._clock)

    def kill_daemon(self, seconds):
        """The daemon proper; its keeper starts the next one."""
        keeper = self.daemons[NODES[int(seconds * 1000) % 2]].pid
        if daemon := self._daemon_below(keeper):
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGKILL)

    def partition(self, seconds):
        """Daemons and coordinator don't hear each other: bytes are swallowed, or connections end."""
        self.relay.part(silent=int(seconds * 1000) % 2 == 0)
        time.sleep(3 * seconds)
        self.relay.heal()

    def lock_database(self, seconds):
        """Another program holds SQLite's write lock, now and then for longer than the coordinator waits."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=30, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return
            time.sleep(12.0 if seconds > 3.7 else seconds)
            other.execute("ROLLBACK")

    def fill_disk(self, seconds):
        """The limit of file sizes stands for a full disk."""
        for size in (0, resource.RLIM_INFINITY):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.coordinator.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            time.sleep(seconds if size == 0 else 0)

    def back_up(self, seconds):
        """A backup that is taken meanwhile is whole."""
        self.check("backup", str(self.folder / "backup.db"), "--replace")

    # ---- and their end

    def heal(self):
        self.relay.heal()
        self._clock.write_text("0")
        self.need_coordinator()

    def need_coordinator(self):
        """Starts it again if it has ended, as systemd would."""
        with self._lock:
            if self.coordinator.poll() is not None:
                self.coordinator = self._start_coordinator()

    def check(self, *command):
        """``bagua coordinator backup | check``; notes what it says if it fails."""
        call = [sys.executable, "-P", "-m", "bagua.daemon.coordinator", *command, "--state-dir", str(self.state)]
        done = subprocess.run(call, capture_output=True, text=True, timeout=300)
        if done.returncode:
            self.troubles.append(f"{' '.join(command)}: {done.stdout}{done.stderr}"[:1000])

    def left_over(self):
        """Processes of jobs that are alive."""
        needle, found = f"MARKS={self.marks}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if needle in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    # ---- processes

    def _start_coordinator(self):
        options = ["--listen", self._address, "--keep", "forever", "--fence-after", "20"]
        environment = {"SOAK_CLOCK": self._clock, "BAGUA_COORDINATOR_HEARTBEAT_S": "1", "PYTHONPATH": self.folder}
        return self._start("clocked", self.state, options, environment)

    def _start_daemon(self, name):
        options = ["--name", name, "--node-id", name, "--coordinator", self.relay.address, "--slots", str(SLOTS)]
        options += ["--token-file", str(self.state / "token"), "--keep-logs", "30"]
        return self._start("bagua.daemon.node", self.folder / name, options, {"XDG_RUNTIME_DIR": self.folder})

    def _start(self, module, state, options, environment):
        """Returns when it is ready. Raises ServiceError."""
        prefix = ["env", *(f"{name}={value}" for name, value in environment.items())]
        options = ["--state-dir", str(state), *options]
        service = ServiceProcess(module, module, options, self.folder / "log", prefix)
        service.wait_ready(time.monotonic() + READY_S)
        return service.process

    @staticmethod
    def _daemon_below(keeper):
        """The daemon proper below a keeper; 0: there is none now."""
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
                if b"bagua.daemon.node" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return 0
