"""A cluster for one job over several hosts: the coordinator here, a node daemon on each host.

How the daemons are started is a ``Way``: ssh (``bagua run --hosts``) or srun (``cli/cluster/slurm.py``).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from bagua.base.address import is_loopback, join_address, own_address
from bagua.base.child_service import last_words
from bagua.base.errors import ConfigError, ServiceError, UsageError
from bagua.base.parent_socket import FOREIGN_SETTINGS
from bagua.base.paths import make_private_dir, write_private
from bagua.base.security import TlsFiles, read_token
from bagua.cli.cluster.local_cluster import EmbeddedCluster
from bagua.cli.options import checked
from bagua.hosts import ssh
from bagua.hosts.end import Order
from bagua.hosts.remote import Remote

if TYPE_CHECKING:
    from bagua.cli.cluster.local_cluster import EmbeddedHost

# For the daemons of all hosts. The first one on a host builds the core.
NODES_DEADLINE_S = 300.0
DRAIN_GRACE_S = 120.0  # how long jobs may take to leave a host whose scheduler announces its end
# Variables of this process that daemons on other hosts get: what a login there may lack.
HERE_TOO = ("PATH", "LD_LIBRARY_PATH", "BAGUA_*")
NOT_THERE = (*FOREIGN_SETTINGS, "BAGUA_JOB_SECRET", "BAGUA_JOB_SECRET_FILE", "BAGUA_DAEMON_SOCKET", "BAGUA_JOB_ID")


class Way(ABC):
    """Way in which daemons come to ``hosts`` hosts. ``address``: this machine's for them. ``job``: of the scheduler.
    ``ends_by_signal``: the scheduler announces the end of the hosts."""

    hosts: int
    address: str
    job: str
    ends_by_signal = False

    @abstractmethod
    def start(self, order: Order, state: Path) -> list[RemoteService]:
        """Starts what ``order`` says on all hosts; outputs go below ``state``. Raises ConfigError."""

    def close(self) -> None:  # noqa: B027
        """Removes what was made for the hosts, when all has ended."""

    def failure(self) -> str:
        """Words on a host whose daemon has ended badly, while its connection lasts; empty: there is none."""
        return ""

    def announce_end(self) -> None:  # noqa: B027
        """Tells hosts that the job is being ended. Those that hear of it from their scheduler, too, need not do
        anything.
        """


class RemoteService:
    """Node daemons behind one connection, as a service of the cluster. Their output goes to ``log``."""

    def __init__(self, label: str, command: Sequence[str], order: str, log: Path, why: str = "") -> None:
        self.label = label
        self._file = log.open("a")
        self._log = log
        self._why = why
        self._ended: SimpleQueue[Remote] = SimpleQueue()
        self._remote = Remote(label, command, order, out=self._file, err=self._file, on_end=self._end)

    def _end(self, remote: Remote) -> None:
        self._file.close()
        self._ended.put(remote)

    def has_ended(self) -> bool:
        """True if the service has ended and its last line is in the log."""
        return not self._ended.empty()

    def describe_end(self) -> str:
        """Waits for the end and says how it ended."""
        remote = self._ended.get()
        self._ended.put(remote)
        why = self._why or ssh.hint(remote.code, sys.executable)
        return f"The {self.label} ended with code {remote.code}{why}.{last_words(self._log)}"

    def signal_group(self, number: int) -> None:
        """Ends what runs there: at once for SIGKILL, else in good order."""
        if number == signal.SIGKILL:
            self._remote.process.kill()
        self._remote.release()

    def wait(self, deadline: float) -> None:
        """Waits for the end; cuts the connection at ``deadline`` (of time.monotonic())."""
        self._remote.end(max(0.1, deadline - time.monotonic()))


class HostCluster(EmbeddedCluster):
    """The coordinator of this machine, and daemons on the hosts of a ``Way``. Several machines talk by mutual TLS, with
    an authority that lives as long as this object."""

    stop_deadline_s = 20.0

    def __init__(self, state: Path, way: Way) -> None:
        super().__init__(state)
        self._way = way

    def start_coordinator(self, *arguments: str, listen: str = "") -> None:
        """Starts the coordinator at the address of the hosts' way."""
        address = self._way.address
        if not is_loopback(address):
            from bagua.enroll.certificates import Authority

            self._authority = Authority()
            arguments = (*arguments, "--tls", str(self._certify(self.state / "tls", [address])))
        super().start_coordinator(*arguments, listen=listen or join_address(address, 0))

    def _certify(self, folder: Path, names: list[str]) -> Path:
        from bagua.enroll.certificates import key_pem, make_request, new_key

        files, key = TlsFiles.in_folder(make_private_dir(folder)), new_key()
        certify = self._authority
        signed = (
            certify.certify(key.public_key(), names) if names else certify.certify_client(make_request(key), "nodes")
        )
        for path, data in ((files.ca, certify.pem()), (files.cert, signed), (files.key, key_pem(key))):
            write_private(path, data)
        return folder

    def start_nodes(
        self, node_ids: Sequence[str], slots: int, *arguments: str, hosts: Sequence[EmbeddedHost] = ()
    ) -> None:
        """A daemon on each host. The way names the nodes."""
        self.services += self._way.start(self._order(slots, arguments), self.state)
        self._wait_for_nodes(len(node_ids))

    def _order(self, slots: int, arguments: Sequence[str]) -> Order:
        files = {"token": read_token(self.token_file)}
        tls: list[str] = []
        if self.tls:
            folder = self._certify(self.state / "nodes", [])
            files |= {f"tls/{path.name}": path.read_text() for path in folder.iterdir()}
            tls = ["--tls", "{state}/tls"]
        return Order(
            module="bagua.daemon.node",
            arguments=[
                *("--coordinator", self.address, "--name", "{node}", "--node-id", "{node}", "--slots", str(slots)),
                *("--state-dir", "{state}", "--token-file", "{state}/token", *tls, "--data-host", "{address}"),
                # One user starts and uses this cluster: ranks get the whole environment of the host.
                *("--pass-env", "*", "--drain-grace", str(DRAIN_GRACE_S), "--death-signal", *arguments),
            ],
            environment=environment(os.environ),
            files=files,
            peer=self.address,
        )

    def _wait_for_nodes(self, count: int) -> None:
        """Raises ServiceError if a host fails, or they do not come in time."""
        from bagua.client import Client

        deadline = time.monotonic() + NODES_DEADLINE_S
        tls = TlsFiles.in_folder(Path(self.tls)) if self.tls else None
        with Client(self.address, token=read_token(self.token_file), tls=tls) as client:
            while (there := sum(node.connected for node in client.nodes())) < count:
                for service in self.services[1:]:  # the first is the coordinator
                    if isinstance(service, RemoteService) and service.has_ended():
                        raise ServiceError(f"{service.describe_end()} [BG910]")
                if words := self._way.failure():
                    raise ServiceError(f"{words} [BG910]")
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"{there} of {count} node daemons came within {NODES_DEADLINE_S:.0f} s. Can the hosts reach "
                        f"{self.address}? --address names another address of this machine. [BG915]"
                    )
                time.sleep(0.1)

    def stop(self) -> None:
        self._way.announce_end()
        super().stop()
        self._way.close()

    def kill(self, rank_pids: Iterable[int] = ()) -> None:
        """Cuts all connections, which ends what runs on the hosts. Ranks' ids are those of other machines."""
        super().kill(())


def environment(here: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Variables of this process for daemons on other hosts."""
    names = [name for name in here if name in HERE_TOO or name.startswith("BAGUA_")]
    # The order brings the token as a file.
    return {name: here[name] for name in names if name not in NOT_THERE and "TOKEN" not in name}


class SshWay(Way):
    """Way with one ssh connection for each host."""

    job = ""

    def __init__(self, logins: list[ssh.Host], command: str, address: str) -> None:
        self.logins, self.command, self.address = logins, command, address
        self.hosts = len(logins)

    def start(self, order: Order, state: Path) -> list[RemoteService]:
        found = []
        for host, name in zip(self.logins, node_names(self.logins), strict=True):
            arguments = [argument.replace("{node}", name) for argument in order.arguments]
            mine = Order(**{**vars(order), "arguments": arguments})
            command = ssh.ssh_command(host, self.command, os.getcwd(), sys.executable)
            found.append(RemoteService(f"node daemon {name}", command, mine.line(), state / f"node-{name}.log"))
        return found


def node_names(hosts: Sequence[ssh.Host]) -> list[str]:
    """Ids of nodes: the hosts' names, with a number where one comes again."""
    found: list[str] = []
    for host in hosts:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", host.address)
        again = sum(one == name or one.startswith(f"{name}-again-") for one in found)
        found.append(f"{name}-again-{again}" if again else name)
    return found


def ssh_way(listed: str, command: str, address: str) -> SshWay:
    """``--hosts``, ``--ssh`` and ``--address``. Raises UsageError for what is no host, and where this machine has no
    address for them."""
    port = os.environ.get(ssh.PORT_VARIABLE) or "0"
    if not port.isdecimal():
        raise UsageError(f"{ssh.PORT_VARIABLE} is {port!r}: it must be a port. [BG101]")
    hosts = [checked(ssh.parse_host, text, int(port), "--hosts") for text in listed.split(",") if text.strip()]
    if not hosts:
        raise UsageError("--hosts names no host. Write --hosts HOST,HOST. [BG101]")
    return SshWay(hosts, command or ssh.default_command(), address or _address_for(hosts))


def _address_for(hosts: Sequence[ssh.Host]) -> str:
    try:
        found = [own_address(join_address(host.address, 22)) for host in hosts]
    except ConfigError as error:
        raise UsageError(f"{error} --address says by which address the hosts reach this machine.") from None
    return next((address for address in found if not is_loopback(address)), found[0])
