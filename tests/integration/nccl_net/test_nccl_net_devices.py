"""Which interfaces are devices, which settings are refused, and IPv6. Each plugin is in a process of its own: settings
are read once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from netrig.peer import Peer

PROBE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from netrig.peer import Worker
print(json.dumps(Worker(Path(sys.argv[2]), Path(sys.argv[3]), False).look()))
"""
HERE = Path(__file__).parent


@pytest.fixture
def look(library: Path, logger_library: Path) -> Any:
    """``look(NAME=value)``: devices, warnings and error of a plugin with this environment."""

    def probe(prefix: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
        base = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "BAGUA_NET_"))}
        command = [*prefix, sys.executable, "-P", "-c", PROBE, str(HERE), str(library), str(logger_library)]
        done = subprocess.run(command, env={**base, **env}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return probe


@pytest.mark.parametrize("names", ("lo", "=lo", "l", "nosuch,lo", "=nosuch,lo"))
def test_interfaces_that_take_loopback(look: Any, names: str) -> None:
    assert look(NCCL_SOCKET_IFNAME=names) == {"devices": ["lo"], "warnings": [], "error": None}


@pytest.mark.parametrize("names", ("=l", "nosuch", "=nosuch,nosuch2"))
def test_interfaces_that_take_nothing(look: Any, names: str) -> None:
    """An error that says what there is, so that NCCL takes something else, or says why not."""
    found = look(NCCL_SOCKET_IFNAME=names)
    assert found["devices"] == [] and found["error"]
    assert any(names in text and "lo" in text for text in found["warnings"]), found["warnings"]


@pytest.mark.parametrize("names", ("^lo", "^=lo", "^l"))
def test_interfaces_that_leave_loopback_out(look: Any, names: str) -> None:
    assert "lo" not in look(NCCL_SOCKET_IFNAME=names)["devices"]


def test_a_family_that_is_none(look: Any) -> None:
    found = look(NCCL_SOCKET_IFNAME="lo", NCCL_SOCKET_FAMILY="AF_UNIX")
    assert found["devices"] == ["lo"]
    assert any("NCCL_SOCKET_FAMILY" in text and "AF_UNIX" in text for text in found["warnings"])


@pytest.mark.parametrize(
    ("name", "value"),
    (
        *(("STREAMS", "0"), ("STREAMS", "many"), ("STREAMS", "-1"), ("STREAMS", "1000"), ("STREAMS", "4x")),
        *(("CHUNK", "0"), ("CHUNK", "1T"), ("CHUNK", "99999999999999999999"), ("THREADS", "-2"), ("THREADS", "1.5")),
        *(("INLINE", "all"), ("CONNECT_TIMEOUT", "0")),
    ),
)
def test_bad_settings_are_told_and_replaced(look: Any, name: str, value: str) -> None:
    found = look(NCCL_SOCKET_IFNAME="lo", **{f"BAGUA_NET_{name}": value})
    assert found["devices"] == ["lo"]
    (warning,) = found["warnings"]
    assert f"BAGUA_NET_{name}" in warning and value in warning


def test_unknown_settings_are_told(look: Any) -> None:
    found = look(NCCL_SOCKET_IFNAME="lo", BAGUA_NET_STREAM="4", BAGUA_NET_STREAMS="4")
    (warning,) = found["warnings"]
    assert "BAGUA_NET_STREAM " in warning.replace(":", " ") and "BAGUA_NET_STREAMS" in warning


def test_an_unknown_congestion_setting_is_told(look: Any) -> None:
    found = look(BAGUA_TCP_CONGESTION="fast")
    (warning,) = found["warnings"]
    assert "BAGUA_TCP_CONGESTION is 'fast': set it to auto or system" in warning and "the system's" in warning


def test_good_settings_are_silent(look: Any, tmp_path: Path) -> None:
    good = {"STREAMS": "2", "CHUNK": "256K", "INLINE": "0", "THREADS": "1", "STATS": str(tmp_path / "stats")}
    found = look(NCCL_SOCKET_IFNAME="lo", **{f"BAGUA_NET_{name}": value for name, value in good.items()})
    assert found["warnings"] == []


@contextmanager
def two(library: Path, logger: Path, **env: str) -> Iterator[tuple[Peer, Peer]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(Peer(library, logger, env)) for _ in range(2))  # type: ignore[misc]


def check_transfer(first: Peer, second: Peer, sizes: tuple[int, ...] = (0, 100, 65_536, 5_000_000)) -> None:
    handle = first.ask("listen")
    first.tell("accept")
    second.ask("connect", handle=handle)
    first.answer()
    for size in sizes:
        first.ask("receive", comm=0, size=size)
        second.ask("send", comm=0, size=size, pattern=3)
        first.tell("wait")
        second.ask("wait")
        low = min(size, 1) * 3
        assert first.answer() == [[size, low, low]]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_ipv6(library: Path, logger_library: Path) -> None:
    if not has_ipv6():
        pytest.skip("this machine's loopback has no IPv6 address")
    with two(library, logger_library, NCCL_SOCKET_FAMILY="AF_INET6") as (first, second):
        check_transfer(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    (
        ({"STREAMS": "1"}, {"STREAMS": "8"}),
        ({"STREAMS": "32", "CHUNK": "16K"}, {"STREAMS": "1"}),
        ({"INLINE": "0", "CHUNK": "64M"}, {"INLINE": "1M", "CHUNK": "16K"}),
        ({"THREADS": "4", "HELP": "0"}, {"THREADS": "0"}),
        ({"THREADS": "2", "HELP": "0"}, {"THREADS": "2", "HELP": "0"}),
    ),
)
def test_ends_with_different_settings_understand_each_other(
    library: Path, logger_library: Path, first: dict[str, str], second: dict[str, str]
) -> None:
    with ExitStack() as stack:
        peers = [
            stack.enter_context(
                Peer(library, logger_library, {f"BAGUA_NET_{name}": value for name, value in settings.items()})
            )
            for settings in (first, second)
        ]
        check_transfer(peers[0], peers[1])


def test_statistics(library: Path, logger_library: Path, tmp_path: Path) -> None:
    """One line per end of each connection, when it is closed."""
    file = tmp_path / "statistics"
    with two(library, logger_library, BAGUA_NET_STATS=str(file)) as (first, second):
        check_transfer(first, second, (1_000_000,))
        second.ask("finish")
        first.ask("finish")
    figures = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(each["direction"] for each in figures) == ["receive", "send"]
    for each in figures:
        assert each["bytes"] == sum(each["stream_bytes"]) + each["inline_bytes"] == 1_000_000
        assert (each["messages"], each["failed"]) == (1, False)


def test_statistics_that_can_not_be_written_are_no_error(library: Path, logger_library: Path, tmp_path: Path) -> None:
    with two(library, logger_library, BAGUA_NET_STATS=str(tmp_path / "no" / "folder")) as (first, second):
        check_transfer(first, second, (100_000,))
        assert any("BAGUA_NET_STATS" in text for text in second.ask("finish") + first.ask("finish"))


@pytest.mark.root
def test_many_devices(look: Any, library: Path, logger_library: Path) -> None:
    """One device for each interface, in a namespace of our own."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("interfaces can be made by root with the program ip")
    name = f"baguanet{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=20).returncode:
        pytest.skip("network namespaces can't be made here")
    try:
        inside = ("ip", "netns", "exec", name)
        for index in range(7):
            device = f"veth{index}"
            subprocess.run(["ip", "-n", name, "link", "add", device, "type", "veth", "peer", f"x{index}"], check=True)
            address = f"10.88.{index}.1/24"
            subprocess.run(["ip", "-n", name, "address", "add", address, "dev", device], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
            if index < 6:  # the last one is up, but its cable leads nowhere
                peer = ["ip", "-n", name, "link", "set", f"x{index}"]
                subprocess.run([*peer, "addrgenmode", "none"], check=True)
                subprocess.run([*peer, "up"], check=True)
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        all_six = [f"veth{index}" for index in range(6)]
        deadline = time.monotonic() + 10  # the kernel notes up to a second later that a link works
        while look(inside)["devices"] != all_six and time.monotonic() < deadline:
            time.sleep(0.1)
        assert look(inside)["devices"] == all_six, "loopback is no device where there are others"
        assert look(inside, NCCL_SOCKET_IFNAME="veth1,veth4")["devices"] == ["veth1", "veth4"]
        assert look(inside, NCCL_SOCKET_IFNAME="=veth3")["devices"] == ["veth3"]
        assert look(inside, NCCL_SOCKET_IFNAME="^veth0,veth2")["devices"] == [
            *("lo", "veth1", "veth3", "veth4", "veth5")
        ]
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def test_unloading(library: Path, logger_library: Path) -> None:
    """NCCL closes the library after the last communicator, and may open it again: no thread may run in what is gone."""
    program = """
import sys
from _ctypes import dlclose
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from netrig import machine
from netrig.fake import FakeNccl, Logger, post, wait
logger = Logger(Path(sys.argv[3]))
threads = machine.threads()
for version in (11, 8, 11):
    nccl = FakeNccl(Path(sys.argv[2]), logger, version)
    sender, receiver = nccl.pair()
    target = receiver.memory(3_000_000)
    wait(post(receiver.irecv, target), post(sender.isend, sender.memory(b"q" * 3_000_000)))
    assert bytes(target.view) == b"q" * 3_000_000
    nccl.finish()
    dlclose(nccl.library._handle)
machine.eventually(lambda: machine.threads() == threads, "threads are left")
print("unloaded")
"""
    command = [sys.executable, "-P", "-c", program, str(HERE), str(library), str(logger_library)]
    done = subprocess.run(
        command,
        env={**os.environ, "NCCL_SOCKET_IFNAME": "lo", "BAGUA_NET_THREADS": "2", "BAGUA_NET_HELP": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "unloaded\n"), done.stderr
