"""A real sshd for this user alone, with keys, settings and a port of its own, on loopback unless a test says more."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rig.limits import SOON_S
from rig.ports import free_port
from rig.programs import program


def find_sshd():
    """The program; skips where there is none that could run."""
    found = program("sshd")
    if os.geteuid() == 0:
        try:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            pytest.skip(f"sshd of root needs /run/sshd: {error}")
    return found


class Sshd:
    """A server for this user alone; ``ssh``: the command that reaches it."""

    def __init__(self, folder, address="127.0.0.1", port=0, prefix=(), **more):
        """``prefix``: a command that runs it. ``more``: settings of sshd_config."""
        self.folder, self.port = folder, port or free_port()
        program = find_sshd()
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(key, check=True, capture_output=True, timeout=60)
        shutil.copy(folder / "user.pub", folder / "authorized")
        name = f"[{address}]:{self.port}" if self.port != 22 else address
        (folder / "known").write_text(f"{name} {(folder / 'host.pub').read_text()}")
        settings = {
            "Port": self.port,
            "ListenAddress": address,
            "HostKey": folder / "host",
            "AuthorizedKeysFile": folder / "authorized",
            "PidFile": folder / "pid",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            **more,
        }
        (folder / "sshd").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        (folder / "ssh").write_text(
            f"IdentityFile {folder / 'user'}\nIdentitiesOnly yes\nUserKnownHostsFile {folder / 'known'}\n"
        )
        self.ssh = f"ssh -F {folder / 'ssh'}"
        self.log = (folder / "log").open("w")
        command = [*prefix, program, "-D", "-e", "-f", str(folder / "sshd")]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self._wait_until_it_serves()

    def _wait_until_it_serves(self):
        deadline = time.monotonic() + SOON_S
        while "Server listening" not in (words := (self.folder / "log").read_text()):
            if self.process.poll() is not None:
                self.close()
                pytest.skip(f"this machine's sshd does not start: {words.strip()}")
            assert time.monotonic() < deadline, words
            time.sleep(0.02)

    def close(self):
        self.process.terminate()
        self.process.wait(SOON_S)
        self.log.close()
