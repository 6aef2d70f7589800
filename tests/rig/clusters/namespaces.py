"""Hosts with addresses of their own on one machine: network namespaces on a bridge. Links between them can be cut."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

from bagua.base.child_service import ServiceProcess

PYTHON = sys.executable
DEADLINE = 120.0
_NOBODY = "02:00:00:00:00:99"


class Hosts:
    """Namespaces 0, 1, ... with addresses 10.77.0.1, 10.77.0.2, ..., and the processes started in them."""

    def __init__(self, folder, count=2):
        self.folder = folder
        mark = uuid.uuid4().hex[:6]
        self.names = [f"bg{mark}{number}" for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._hub = f"bg{mark}hub"
        self.processes = []

    def up(self):
        """Raises CalledProcessError where namespaces can't be made."""
        for name in (self._hub, *self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            ends = ("veth0", "netns", name, "type", "veth", "peer", "name", name, "netns", self._hub)
            _ip("link", "add", *ends)
            _ip("-n", self._hub, "link", "set", name, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "veth0", "up")

    def cut(self, source, target):
        """What the one sends to the other is lost from now on, in silence; the other direction works."""
        self._neighbour("replace", source, target, "lladdr", _NOBODY, "nud", "permanent")

    def _neighbour(self, verb, source, target, *what):
        _ip("-n", self.names[source], "neigh", verb, self.addresses[target], *what, "dev", "veth0")

    def start(self, host, *command, env=None):
        """Starts a program on a host, in a session of its own, with a state folder of that host."""
        full = {**os.environ, "BAGUA_STATE_DIR": str(self.folder / f"state-{host}"), **(env or {})}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            env=full,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, host, *command, env=None):
        """Runs a program on a host to its end and returns what it printed; fails the test unless it exits 0."""
        process = self.start(host, *command, env=env)
        output, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, output
        return output

    def down(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in (self._hub, *self.names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def hosts_up(folder, count=2):
    """Skips the test where namespaces can't be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the program ip (Debian: iproute2)")
    made = Hosts(folder, count)
    try:
        try:
            made.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
        yield made
    finally:
        made.down()


def bagua(*arguments):
    return [PYTHON, "-P", "-m", "bagua.cli.main", *arguments]


def start_service(hosts, host, *words):
    """``bagua`` with these words."""
    prefix = ["ip", "netns", "exec", hosts.names[host], "env", f"BAGUA_STATE_DIR={hosts.folder / f'state-{host}'}"]
    made = ServiceProcess(words[0], "bagua.cli.main", words, hosts.folder / f"services-{host}.log", prefix)
    hosts.processes.append(made.process)
    return made.wait_ready(time.monotonic() + DEADLINE)


def start_cluster(hosts, folder, *more, coordinator=0):
    """A coordinator on that host, and a daemon on each for which there is ``more`` of its options; how to reach the
    coordinator."""
    certs, address = folder / "certs", hosts.addresses[coordinator]
    hosts.run(coordinator, *bagua("certs", str(certs), "--host", address))
    start_service(hosts, coordinator, "coordinator", "--listen", f"{address}:7670", "--tls", str(certs))
    token = ["--token-file", str(folder / f"state-{coordinator}" / "token")]
    reach = ["--coordinator", f"{address}:7670", "--tls", str(certs), *token]
    for host, (address, options) in enumerate(zip(hosts.addresses, more, strict=False)):
        named = ["--name", f"h{host}", "--slots", "2", "--data-host", address]
        start_service(hosts, host, "daemon", *reach, *named, *options)
    return reach
