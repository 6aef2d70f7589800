"""Emulation of some hosts on one machine: network namespaces joined by a wire with a rate and a delay. Needs root.

Two hosts without a delay have a veth pair, shaped by tbf on both ends. Else the wire is a relay between TUN devices
(csrc/tools/delay_relay.cpp), because netem is missing from many kernels. The rate is that at which each host sends; a
host receives from several others at once. The machine's own network is not touched.

Names carry the process that made them, so that the next start removes what a killed one left.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bagua.base.errors import BuildError, ConfigError, ServiceError
from bagua.tuning.network import Network

DEVICE = "net0"
MOST_HOSTS = 16
PREFIX = "baguabench-"
COMMAND_DEADLINE_S = 20.0
RELAY_DEADLINE_S = 10.0
CARRIER_DEADLINE_S = 10.0
LARGEST_PACKET = 65536
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def addresses(hosts: int) -> list[str]:
    """Returns addresses of so many hosts, in their order."""
    return [f"10.77.0.{index + 1}" for index in range(hosts)]


def start_time(pid: int) -> int | None:
    """Returns when process ``pid`` was started, in ticks since the boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name, in parentheses, may hold blanks and parentheses.
    return int(text.rpartition(")")[2].split()[19])


def namespace_name(pid: int, started: int, index: int) -> str:
    """The name of host ``index`` of a process."""
    return f"{PREFIX}{pid}-{started}-{index}"


def leftovers(names: Iterable[str], start_time_of: Callable[[int], int | None]) -> list[str]:
    """Returns those of our names whose maker is gone: no such process, or another one under its number."""
    found = []
    for name in names:
        match = re.fullmatch(re.escape(PREFIX) + r"(\d+)-(\d+)-\d+", name)
        if match and start_time_of(int(match.group(1))) != int(match.group(2)):
            found.append(name)
    return found


def check_possible(network: Network, hosts: int = 2) -> None:
    """Raises ConfigError, with what to do, if this user or this machine can't emulate ``network``."""
    if os.geteuid() != 0:
        raise ConfigError(
            "--emulate makes network namespaces, which needs root: run it as root, or leave it out. [BG002]"
        )
    for program in ("ip", "tc"):
        if shutil.which(program, path=SEARCH_PATH) is None:
            raise ConfigError(
                f"--emulate needs the program {program}: install iproute2 (apt-get install iproute2). [BG002]"
            )
    if (network.delay_s or hosts > 2) and not Path("/dev/net/tun").exists():
        raise ConfigError(
            "A delay, or more than two hosts, need /dev/net/tun, which this machine does not have: emulate the rate "
            "alone, between two hosts. [BG002]"
        )


def _command(*arguments: str, check: bool = True) -> str:
    """Output of ``ip`` or ``tc``. Raises ServiceError with its words."""
    program = shutil.which(arguments[0], path=SEARCH_PATH) or arguments[0]
    try:
        done = subprocess.run(
            [program, *arguments[1:]], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"{' '.join(arguments)} failed: {error} [BG002]") from error
    if check and done.returncode:
        raise ServiceError(f"The emulated network can't be made: {' '.join(arguments)}: {done.stderr.strip()} [BG002]")
    return done.stdout


class Emulation:
    """Namespaces with ``addresses`` on ``DEVICE``, joined by ``network``, while the context lasts."""

    def __init__(self, network: Network, hosts: int = 2) -> None:
        self.network = network
        self.addresses = addresses(hosts)
        started = start_time(os.getpid()) or 0
        self.names = tuple(namespace_name(os.getpid(), started, index) for index in range(hosts))
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Emulation:
        check_possible(self.network, len(self.names))
        program = built("delay_relay") if self.network.delay_s or len(self.names) > 2 else None
        # A name may have "(id: 0)" behind it.
        present = [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line.strip()]
        for name in leftovers(present, start_time):
            _command("ip", "netns", "delete", name, check=False)
        try:
            for name in self.names:
                _command("ip", "netns", "add", name)
                _command("ip", "-n", name, "link", "set", "lo", "up")  # a new namespace has its loopback down
            if program is None:
                self._join_by_veth()
            else:
                self._join_by_relay(program)
            for name, address in zip(self.names, self.addresses, strict=True):
                self._configure(name, address)
            for name in self.names:
                self._await_carrier(name)
        except BaseException:  # Ctrl-C, too: namespaces outlive this process
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes what was made. Idempotent."""
        if self._relay is not None:
            relay, self._relay = self._relay, None
            assert relay.stdin is not None and relay.stdout is not None
            relay.stdin.close()
            relay.kill()
            relay.wait()
            relay.stdout.close()
        for name in self.names:
            with contextlib.suppress(ServiceError):
                _command("ip", "netns", "delete", name, check=False)

    def _join_by_veth(self) -> None:
        near, far = self.names  # both ends are made in namespaces: the machine's own network never has them
        _command(
            *("ip", "link", "add", DEVICE, "netns", near),
            *("type", "veth", "peer", "name", DEVICE, "netns", far),
        )
        if not self.network.rate:
            return
        burst = self.network.burst_bytes
        for name in self.names:
            _command(
                *("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root"),
                *("tbf", "rate", f"{self.network.rate:.0f}bit", "burst", str(burst), "latency", "20ms"),
            )
            # tbf would cut a packet larger than its bucket in software.
            if burst < LARGEST_PACKET:
                _command("ip", "-n", name, "link", "set", "dev", DEVICE, "gso_max_size", str(burst))

    def _join_by_relay(self, program: Path) -> None:
        command = [str(program), *self.names, DEVICE, f"{self.network.delay_s * 1e6:.0f}", f"{self.network.rate:.0f}"]
        self._relay = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # where it can't start, its words come in the place of "ready"
            text=True,
            start_new_session=True,  # a Ctrl-C is for us
        )
        assert self._relay.stdout is not None
        deadline = time.monotonic() + RELAY_DEADLINE_S
        ready, _, _ = select.select([self._relay.stdout], [], [], max(0.0, deadline - time.monotonic()))
        words = self._relay.stdout.readline().strip() if ready else "it does not answer"
        if words != "ready":
            raise ServiceError(f"The relay that delays packets can't start: {words or 'it ended'} [BG002]")

    def _configure(self, name: str, address: str) -> None:
        _command("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
        _command("ip", "-n", name, "link", "set", DEVICE, "txqueuelen", "1000", "up")

    def _await_carrier(self, name: str) -> None:
        """The kernel notes up to a second later that a link works, and NCCL and its plugins take no other."""
        deadline = time.monotonic() + CARRIER_DEADLINE_S
        while "NO-CARRIER" in _command("ip", "-n", name, "link", "show", DEVICE):
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"The emulated network does not come up: {DEVICE} in {name} has no carrier after "
                    f"{CARRIER_DEADLINE_S:.0f} s. Try again; the kernel's log (dmesg) may say why. [BG002]"
                )
            time.sleep(0.02)


def built(name: str) -> Path:
    """A program of ``csrc/tools``, or "net_plugin", built if need be. Raises BuildError."""
    from bagua import csrc
    from bagua.csrc.build_tool import build_tool

    try:
        return csrc.net_plugin() if name == "net_plugin" else build_tool(name)
    except csrc.BuildError as error:
        raise BuildError(str(error)) from error
