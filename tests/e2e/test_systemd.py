"""Coordinator and node daemon as services of systemd: what they say at its socket, and their unit files."""

import contextlib
import ctypes
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rig.clusters.sshd import find_sshd
from rig.docs import pages
from rig.system import booted, service_filter

from bagua.base.daemon_process import daemon_pid
from bagua.base.paths import cache_dir

WAIT_S = 120.0
PROGRAM = [sys.executable, "-P", "-m", "bagua.cli.main"]
UNITS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "systemd").glob("*.service"))
DROP_IN = UNITS[0].parent / "bagua-node-run-as-submitter.conf"
MADE = {
    "StateDirectory": "/var/lib",
    "CacheDirectory": "/var/cache",
    "LogsDirectory": "/var/log",
    "RuntimeDirectory": "/run",
}
"""Where systemd makes folders."""
MOST_EXPOSED = {"bagua-backup.service": 1.5, "bagua-coordinator.service": 1.5, "bagua-node.service": 2.5}
"""On the scale of `systemd-analyze security`, from 0 to 10. A node runs programs of its users."""


def closed(name):
    """The beginning of a command line that runs below the system calls which the unit of that name allows; nothing
    where this machine can't do that."""
    try:
        ctypes.CDLL(service_filter.LIBRARY)
    except OSError:
        return []
    if shutil.which("systemd-analyze") is None:
        return []
    return [sys.executable, service_filter.__file__, str(UNITS[0].parent / f"bagua-{name}.service")]


class Manager:
    """systemd's end: a socket at which one service says how it does, and what its unit allows."""

    def __init__(self, folder, name, *command, **environment):
        self.path = folder / f"{name}.notify"
        self.words = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.words.bind(str(self.path))
        self.words.settimeout(0.2)
        self.heard = []
        self._said = queue.SimpleQueue()
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        asked = {"NOTIFY_SOCKET": str(self.path), "WATCHDOG_USEC": "600000", "BAGUA_STATE_DIR": str(folder / "state")}
        self.process = subprocess.Popen(
            [*closed(name), *PROGRAM, *command],
            env={**os.environ, **asked, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )

    def _listen(self):
        """As systemd does, all the time: the kernel keeps ten messages, and the next one would be lost."""
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                self._said.put(self.words.recv(4096).decode())

    def until(self, name, value="1"):
        """The next message that says so."""
        give_up = time.monotonic() + WAIT_S
        while time.monotonic() < give_up:
            assert self.process.poll() is None or name == "STOPPING", self.process.stderr
            try:
                lines = self._said.get(timeout=1.0).splitlines()
            except queue.Empty:
                continue
            self.heard.append(dict(line.split("=", 1) for line in lines))
            if self.heard[-1].get(name) == value:
                return self.heard[-1]
        raise AssertionError(f"{name} was not said: {self.heard}")

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(WAIT_S)
        finally:
            assert self.process.stderr is not None
            self.process.stderr.close()
            self._over.set()
            self._listener.join()
            self.words.close()


@pytest.fixture
def coordinator(tmp_path):
    manager = Manager(tmp_path, "coordinator", "coordinator", "--listen", "127.0.0.1:0")
    yield manager
    manager.end()


def test_services_tell_systemd_how_they_do(tmp_path, coordinator):
    address = coordinator.until("READY")["STATUS"].removeprefix("serving at ")
    coordinator.until("WATCHDOG")
    folders = {name: str(tmp_path / name) for name in ("logs", "run")}
    node = Manager(
        tmp_path,
        "node",
        *("daemon", "--coordinator", address, "--name", "a", "--slots", "1"),
        BAGUA_LOG_DIR=folders["logs"],
        BAGUA_RUNTIME_DIR=folders["run"],
    )
    try:
        assert "starts" in node.until("STATUS", "the daemon starts, and looks for its coordinator")["STATUS"]
        assert address in node.until("READY")["STATUS"]
        node.until("WATCHDOG")
        daemon = psutil.Process(daemon_pid(node.process.pid))
        assert "NOTIFY_SOCKET" not in daemon.environ(), "ranks would speak in the service's name"
        node.process.send_signal(signal.SIGHUP)  # systemctl reload
        assert int(node.until("RELOADING")["MONOTONIC_USEC"]) > 0
        node.until("READY")
        assert daemon_pid(node.process.pid) != daemon.pid, "the installed one has taken over"
        node.process.send_signal(signal.SIGTERM)
        node.until("STOPPING")
        assert (tmp_path / "run").is_dir()
    finally:
        assert node.end() == 0
    coordinator.process.send_signal(signal.SIGTERM)
    coordinator.until("STOPPING")
    assert coordinator.end() == 0


@pytest.mark.full
@pytest.mark.timeout(900)  # a training on a busy machine
def test_training_runs_below_the_rules_of_the_units(tmp_path, coordinator):
    if not closed("node"):
        pytest.skip("libseccomp or systemd-analyze is not installed")
    address = coordinator.until("READY")["STATUS"].removeprefix("serving at ")
    node = Manager(tmp_path, "node", *("daemon", "--coordinator", address, "--name", "a", "--slots", "2"))
    try:
        node.until("READY")
        job = ["job", "submit", "--coordinator", address, "--nproc-per-node", "2", "--watch"]
        done = subprocess.run(
            [*PROGRAM, *job, "-m", "bagua.examples.digits"],
            env={**os.environ, "BAGUA_STATE_DIR": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        node.end()


def analyze(*arguments):
    """The words of systemd-analyze; its exit code says nothing."""
    command = ["systemd-analyze", "--no-pager", *map(str, arguments)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S)
    except FileNotFoundError:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    return done.stdout


@pytest.fixture(params=UNITS, ids=lambda path: path.name)
def unit(request, tmp_path):
    """A unit whose program exists on this machine, whatever is installed."""
    copy = tmp_path / request.param.name
    copy.write_text(request.param.read_text().replace("/usr/bin/bagua", "/bin/true"))
    return copy


def test_units(unit):
    """They are understood, and closed. Each folder that a unit names is one that systemd makes for it, and that
    tmpfiles.d knows."""
    assert analyze("verify", "--man=no", unit) == ""
    text = unit.read_text()
    unit.write_text(re.sub("^Type=.*", "Type=nobody", text, flags=re.MULTILINE))
    assert "nobody" in analyze("verify", "--man=no", unit), "mistakes are found"
    unit.write_text(text)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", analyze("security", "--offline=true", unit))
    assert found and float(found[1]) <= MOST_EXPOSED[unit.name]
    known = (UNITS[0].parent / "bagua.tmpfiles").read_text()
    made = {**MADE, "ConfigurationDirectory": "/etc"}
    named = {f"{made[key]}/{value}" for key, value in re.findall(r"^(\w+Directory)=(\S+)$", text, re.MULTILINE)}
    assert set(re.findall(r"BAGUA_\w+_DIR=(\S+)", text)) <= named
    assert all(f"d {path.removesuffix('/node')} " in known for path in named)


def test_the_drop_in_for_ranks_of_their_submitters_is_understood(tmp_path):
    """And does not open more than it says."""
    unit = tmp_path / "bagua-node.service"
    unit.write_text((UNITS[0].parent / unit.name).read_text().replace("/usr/bin/bagua", "/bin/true"))
    drop_in = tmp_path / f"{unit.name}.d" / "run-as-submitter.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(DROP_IN.read_text())
    assert analyze("verify", "--man=no", unit) == ""
    drop_in.write_text(DROP_IN.read_text() + "KillMode=nobody\n")
    assert "nobody" in analyze("verify", "--man=no", unit), "it is read"
    text = DROP_IN.read_text()
    lines = [(folder, re.findall(rf"^{key}=(.+)$", text, re.MULTILINE)) for key, folder in MADE.items()]
    made = [f"{folder}/{name}" for folder, values in lines for value in values for name in value.split()]
    assert sorted(re.findall(r"BAGUA_\w+_DIR=(\S+)", text)) == sorted(made)


def test_settings_files_name_variables_that_exist():
    """Every line is a setting that is switched off; the coordinator and the daemon take them."""
    from bagua.daemon.coordinator.admin.settings import Settings

    folder = UNITS[0].parent / "settings"

    def given(name):
        lines = (folder / f"{name}.env").read_text().splitlines()
        return dict(line[1:].split("=", 1) for line in lines if re.match(r"#[A-Z_]+=", line))

    settings = {name.removeprefix("BAGUA_COORDINATOR_").lower(): value for name, value in given("coordinator").items()}
    assert settings and set(settings) <= set(Settings.model_fields)
    Settings(**settings)
    options = subprocess.run([*PROGRAM, "daemon", "--keeper-fd", "0", "--help"], capture_output=True, text=True)
    help_text = re.sub(r"[^\w-]+", " ", options.stdout)
    node = given("node")
    flags = re.findall(r"--[a-z-]+", node.pop("DAEMON_OPTIONS"))
    assert [word for word in [*node, *flags] if word not in help_text] == []


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd's programs are not installed")
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: folders get owners")
def test_the_page_installs_a_service(tmp_path):
    """The commands of docs/install.md, into an empty root."""
    [commands] = pages.texts_run_by("test_the_page_installs_a_service", "docs/install.md")
    commands = commands.replace("/opt/bagua/share/bagua/systemd", str(UNITS[0].parent))
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    done = subprocess.run(
        ["sh", "-eux", "-c", commands], env={**os.environ, "DESTDIR": str(root)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "bagua:x:" in (root / "etc" / "passwd").read_text()
    users = (root / "etc" / "passwd").read_text()
    number = int(re.findall(r"^bagua:x:(\d+):", users, re.MULTILINE)[0])
    for place in ("var/lib/bagua", "var/log/bagua", "var/cache/bagua", "etc/bagua/tls"):
        status = (root / place).stat()
        assert (status.st_uid, status.st_mode & 0o777) == (number, 0o700), place
    assert {path.name for path in (root / "etc" / "bagua").glob("*.env")} == {"coordinator.env", "node.env"}
    units = {path.name for path in UNITS} | {"bagua-backup.timer"}
    assert {path.name for path in (root / "usr/lib/systemd/system").iterdir()} == units


def install(host):
    """As the page says, with the program of this environment, and with the core that was compiled for it."""
    [commands] = pages.texts_run_by("test_the_page_installs_a_service", "docs/install.md")
    commands = commands.replace("/opt/bagua/share/bagua/systemd", str(UNITS[0].parent))
    here = "[Service]\\nProtectHome=no\\n"  # this Python may lie in a home
    program = " ".join(PROGRAM)
    host.sh(f"printf '#!/bin/sh\nexec {program} \"$@\"\n' > /usr/bin/bagua; chmod 755 /usr/bin/bagua")
    host.sh(f"DESTDIR=; {commands}")
    host.sh(f"cp -r {cache_dir()}/. /var/cache/bagua/ && chown -R bagua: /var/cache/bagua || true")
    for unit in UNITS:
        folder = f"/etc/systemd/system/{unit.name}.d"
        host.sh(f"mkdir {folder}; printf '{here}' > {folder}/here.conf")


@pytest.fixture
def alias():
    """The words of the page's ``bagua-admin``."""
    if reason := booted.reason_to_skip():
        pytest.skip(reason)
    page = (UNITS[0].parents[2] / "docs" / "install.md").read_text()
    (words,) = re.findall(r"^alias bagua-admin='(.*)'$", page, re.MULTILINE)
    return words


TELL = "{ journalctl --no-pager -n 40; exit 1; }"


@pytest.mark.full
@pytest.mark.root
@pytest.mark.timeout(900)  # a system starts, on a busy machine
def test_services_below_a_real_systemd(core, alias, tmp_path):
    """The page's way, from the files to a backup and back."""
    first, administer, submitters = pages.texts_run_by("test_services_below_a_real_systemd", "docs/install.md")
    [nightly] = pages.texts_run_by("test_services_below_a_real_systemd", "docs/operations.md")
    with booted.booted(tmp_path) as host:
        install(host)
        host.sh(f"set +e; ({first}) || {TELL}")
        nodes = f"cd /; {alias} node list --output json"
        assert '"connected"' in host.sh(nodes)
        daemon = "pgrep -f '[k]eeper-fd'"  # not this command itself
        before = host.sh(daemon)
        host.sh("systemctl reload bagua-node; systemctl is-active bagua-node")
        assert host.sh(daemon) != before, "the installed daemon has taken over"
        assert "of 2 (local" in host.sh(administer)
        *begin, look = nightly.splitlines()
        host.sh("\n".join(begin))
        assert "bagua-backup.service" in host.attempt(look).stdout
        assert "bagua-backup.timer" in host.sh("systemctl list-timers --no-pager")
        assert "problem" not in host.sh(f"cd /; {alias} coordinator check $(ls /var/lib/bagua/backup-?.db)")
        file = "/var/lib/bagua/backup.db"
        host.sh("systemctl stop bagua-coordinator")
        refused = host.attempt(f"cd /; BAGUA_STATE_DIR=/var/lib/bagua bagua coordinator restore {file} --replace")
        host.sh(f"cd /; {alias} coordinator restore {file} --replace; systemctl start bagua-coordinator")
        assert "runuser" in refused.stdout, "root's file could not be read by the service"
        host.sh(f"({submitters.replace('/opt/bagua/share/bagua/systemd', str(UNITS[0].parent))}) || {TELL}")
        owners = host.sh("stat -c %U /proc/$(systemctl show -P MainPID bagua-node) /var/lib/bagua-node/token").split()
        assert owners == ["root", "root"]
        host.sh("systemctl stop bagua-node bagua-coordinator")
        assert host.sh("systemctl show -P Result bagua-node bagua-coordinator").split() == ["success"] * 2


def connect(first, second):
    """A cable between them, with the addresses of the page. The first one's root may enter the second by ssh."""
    find_sshd()
    ends = {f"bga{first.pid}": (first, "10.0.0.1/24"), f"bgb{first.pid}": (second, "10.0.0.2/24")}
    one, other = ends
    subprocess.run(["ip", "link", "add", one, "type", "veth", "peer", "name", other], check=True, timeout=WAIT_S)
    for name, (host, address) in ends.items():
        subprocess.run(["ip", "link", "set", name, "netns", str(host.pid)], check=True, timeout=WAIT_S)
        host.sh(f"ip addr add {address} dev {name}; ip link set {name} up")
    first.sh("mkdir -p -m 700 /root/.ssh; rm -f /root/.ssh/*; ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519")
    key = first.sh("cat /root/.ssh/id_ed25519.pub").strip()
    second.sh(f"mkdir -p -m 700 /root/.ssh /run/sshd; echo '{key}' > /root/.ssh/authorized_keys; ssh-keygen -A")
    second.sh("/usr/sbin/sshd -o PermitRootLogin=yes -o UsePAM=no")
    first.sh("printf 'StrictHostKeyChecking accept-new\nBatchMode yes\n' > /root/.ssh/config")


@pytest.mark.full
@pytest.mark.root
@pytest.mark.timeout(900)  # two systems start, on a busy machine
def test_two_hosts_below_a_real_systemd(core, alias, tmp_path):
    """The page's way, with its addresses. A job runs on both, as its node alone has no room for it."""
    certificates, serve, join = pages.texts_run_by("test_two_hosts_below_a_real_systemd", "docs/install.md")
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with booted.booted(folders[0]) as first, booted.booted(folders[1]) as second:
        connect(first, second)
        for host in (first, second):
            install(host)
        first.sh(certificates)
        settings = "BAGUA_COORDINATOR_LISTEN=10.0.0.1:7670\nBAGUA_COORDINATOR_TLS=/etc/bagua/tls\n"
        first.sh(f"printf '{settings}' >> /etc/bagua/coordinator.env")
        first.sh(f"(\n{serve}\n) || {TELL}")
        for host, address in ((first, "10.0.0.1"), (second, "10.0.0.2")):
            lines = ["BAGUA_COORDINATOR=10.0.0.1:7670", "BAGUA_TLS=/etc/bagua/tls"]
            lines += [f"DAEMON_OPTIONS=--data-host {address} --slots 1"]
            if host is second:  # the first one finds the token of its coordinator
                lines += ["BAGUA_TOKEN_FILE=/etc/bagua/token"]
            host.sh("printf '%s\\n' " + " ".join(f"'{line}'" for line in lines) + " >> /etc/bagua/node.env")
            host.sh(f"(\n{join}\n) || {TELL}")
        job = "job submit --nnodes 2 --watch -m bagua.examples.announcement"
        said = first.sh(f"cd /; {alias} {job}")
        assert said.count("of 2 (local") == 2, said
