"""Two hosts with addresses of their own: namespaces joined by a veth pair. Needs root; skips with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

PYTHON = sys.executable
DEADLINE = 120.0

pytestmark = [pytest.mark.root, pytest.mark.slow]


class Hosts:
    """Namespaces 0 and 1 with addresses 10.77.0.1 and 10.77.0.2, and the processes started in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mark = uuid.uuid4().hex[:6]
        self.names = [f"bg{mark}a", f"bg{mark}b"]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self.processes: list[subprocess.Popen[str]] = []

    def up(self) -> None:
        def ip(*arguments: str) -> None:
            subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)

        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            "veth0",
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")

    def start(self, host: int, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
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

    def run(self, host: int, *command: str, env: dict[str, str] | None = None) -> str:
        """Runs a program on a host to its end and returns what it printed; fails the test unless it exits 0."""
        process = self.start(host, *command, env=env)
        output, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, output
        return output

    def down(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not shutil.which("ip"):
        pytest.skip("network namespaces need the program ip (Debian: iproute2)")
    made = Hosts(tmp_path)
    try:
        try:
            made.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
        yield made
    finally:
        made.down()


def bagua(*arguments: str) -> list[str]:
    return [PYTHON, "-P", "-m", "bagua.cli.main", *arguments]


def wait_for_line(process: subprocess.Popen[str], read_end: int) -> dict[str, str]:
    """The ready line that a service writes to the descriptor it was given."""
    with os.fdopen(read_end) as pipe:
        line = pipe.readline()
    assert line, process.communicate(timeout=10)[0]
    return json.loads(line)


def start_service(hosts: Hosts, host: int, *command: str) -> dict[str, str]:
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    full = {**os.environ, "BAGUA_STATE_DIR": str(hosts.folder / f"state-{host}")}
    with (hosts.folder / f"services-{host}.log").open("a") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", hosts.names[host], *command, "--ready-fd", str(write_end)],
            env=full,
            pass_fds=[write_end],
            stdout=subprocess.DEVNULL,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    hosts.processes.append(process)
    os.close(write_end)
    ready = wait_for_line(process, read_end)
    assert "error" not in ready, ready
    return ready


def start_cluster(hosts: Hosts, folder: Path, *more: tuple[str, ...]) -> list[str]:
    """A coordinator on host 0 and a daemon on each, ``more`` of its options; how to reach the coordinator."""
    certs = folder / "certs"
    hosts.run(0, *bagua("certs", str(certs), "--host", hosts.addresses[0]))
    start_service(hosts, 0, *bagua("coordinator", "--listen", f"{hosts.addresses[0]}:7670", "--tls", str(certs)))
    token = ["--token-file", str(folder / "state-0" / "token")]
    reach = ["--coordinator", f"{hosts.addresses[0]}:7670", "--tls", str(certs), *token]
    for host, (address, options) in enumerate(zip(hosts.addresses, more, strict=True)):
        named = ["--name", f"h{host}", "--slots", "2", "--data-host", address]
        start_service(hosts, host, *bagua("daemon", *reach, *named, *options))
    return reach


def test_service_on_two_hosts_with_tls(hosts: Hosts, tmp_path: Path) -> None:
    """Coordinator and a daemon on one host, a daemon on the other; mutual TLS; one rank each; one sum."""
    reach = start_cluster(hosts, tmp_path, (), ())
    for host in range(2):
        assert "connections to other hosts are encrypted" in (tmp_path / f"services-{host}.log").read_text()
    script = tmp_path / "sum.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import bagua.torch_api as bagua

        bagua.init_process_group()
        tensor = torch.full((100_003,), float(bagua.get_rank() + 1))
        bagua.allreduce_inplace(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, 3.0)), tensor
        statistics = bagua.communication.statistics()
        print("between hosts", statistics.bytes_sent)
        assert statistics.bytes_sent > 400_000
        """)
    )
    size = ["--nnodes", "2", "--nproc-per-node", "1"]
    # From the other host: the client, too, comes with TLS and the token.
    output = hosts.run(1, *bagua("job", "submit", *size, "--watch", "--output", "json", *reach, str(script)))
    assert "succeeded" in output.lower()


@pytest.mark.full  # integration/engine/test_engine_encryption.py
def test_hosts_that_disagree_about_encryption(hosts: Hosts, tmp_path: Path) -> None:
    """One daemon with --plain-data, one without: both logs say what they do, and the job says what is wrong."""
    reach = start_cluster(hosts, tmp_path, (), ("--plain-data",))
    assert "NOT encrypted (--plain-data)" in (tmp_path / "services-1.log").read_text()
    script = tmp_path / "sum.py"
    script.write_text("import bagua.torch_api as bagua\nbagua.init_process_group()\nbagua.barrier()\n")
    size = ["--nnodes", "2", "--nproc-per-node", "1"]
    process = hosts.start(0, *bagua("job", "submit", *size, "--watch", *reach, str(script)))
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0
    assert "--plain-data" in output and "give it to all hosts or to none" in " ".join(output.split()), output


def test_coordinator_beyond_loopback_without_tls_is_refused(hosts: Hosts) -> None:
    process = hosts.start(0, *bagua("coordinator", "--listen", f"{hosts.addresses[0]}:7670"))
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "bagua certs" in output


@pytest.mark.full  # test_ephemeral.py has two agents of torchrun on this machine
@pytest.mark.parametrize("secret", ["7c4f0e5a91d2b3867c4f0e5a91d2b386", ""], ids=["with a secret", "without one"])
def test_scripts_started_by_torchrun_style_environment_on_two_hosts(hosts: Hosts, tmp_path: Path, secret: str) -> None:
    """No daemon anywhere: each host's first rank brings one up, and nothing is left at the end. Without a secret that
    the hosts share, every rank says what to set."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import bagua.torch_api as bagua

        bagua.init_process_group()
        tensor = torch.tensor([float(bagua.get_rank())])
        bagua.allreduce_inplace(tensor)
        if bagua.get_rank() == 0:  # the coordinator listens where others reach this host, and nowhere else
            import os, psutil
            for process in psutil.process_iter(["cmdline"]):
                if "bagua.daemon.ephemeral" in (process.info["cmdline"] or []):
                    if process.environ().get("BAGUA_TEST_MARK") == os.environ["BAGUA_TEST_MARK"]:
                        found = [c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"]
                        assert [ip.removeprefix("::ffff:") for ip in found] == [os.environ["MASTER_ADDR"]], found
                        print("listens", flush=True)
        bagua.barrier()
        print("sum", tensor.item(), flush=True)
        """)
    )
    marker = f"BAGUA_TEST_MARK={uuid.uuid4().hex}"
    ranks = []
    for rank in range(4):
        environment = {
            "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": str(rank // 2), "GROUP_RANK": str(rank // 2),
            "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "veth0",
            "BAGUA_JOB_SECRET": secret, "XDG_CONFIG_HOME": str(tmp_path),
            marker.split("=")[0]: marker.split("=")[1],
        }  # fmt: skip
        ranks.append(hosts.start(rank // 2, PYTHON, "-P", str(script), env=environment))
    outputs = [process.communicate(timeout=DEADLINE)[0] for process in ranks]
    if secret:
        assert [process.returncode for process in ranks] == [0] * 4, "\n".join(outputs)
        assert all("sum 6.0" in output for output in outputs) and "listens" in outputs[0], outputs
    else:
        assert all(process.returncode == 1 for process in ranks)
        assert all("set BAGUA_JOB_SECRET or BAGUA_JOB_SECRET_FILE" in output for output in outputs), outputs
    assert_all_gone(marker, within_s=15.0)


def processes_with(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if marker.encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def assert_all_gone(marker: str, within_s: float) -> None:
    """Fails, naming them, if processes with the environment marker are still there after so many seconds."""
    import time

    deadline = time.monotonic() + within_s
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
