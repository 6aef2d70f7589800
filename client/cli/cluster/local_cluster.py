"""The embedded cluster of ``bagua run``: one coordinator and N node daemons as child processes on this machine.

Every child runs in a session of its own (a Ctrl-C at the terminal reaches only us) and asks the kernel for SIGTERM when
we die, so nothing outlives this process, however it ends. The kernel watches the *thread* that started a child: start
the cluster from the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Protocol

from bagua.base.address import is_loopback, require_loopback, split_address
from bagua.base.child_service import ServiceProcess as ServiceProcess
from bagua.base.parent_socket import FOREIGN_SETTINGS
from bagua.base.run_folder import RunFolder as RunFolder
from bagua.cli.cluster.signals import uninterrupted

# As long as ranks wait for services of their own (torch_api/job/ephemeral.py). An interpreter starts slowly on an
# overloaded machine, or while the core is compiled beside: 60 s were too short at a load of 44.
START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 4.5


def forget_other_service() -> None:
    """Takes the settings of another service out of the environment: neither we nor our children shall meet it."""
    for name in FOREIGN_SETTINGS:
        os.environ.pop(name, None)


@dataclass(frozen=True)
class EmbeddedHost:
    """Place of a node daemon: the beginning of its command line, and the address of its data (empty: loopback)."""

    prefix: tuple[str, ...] = ()
    address: str = ""


class Service(Protocol):
    """A coordinator or node daemon, here (``ServiceProcess``) or on another host."""

    label: str

    def describe_end(self) -> str: ...
    def signal_group(self, number: int) -> None: ...
    def wait(self, deadline: float) -> None: ...


class EmbeddedCluster:
    """Coordinator and node daemons below one state folder, all on this machine. Leaving the context stops them all.

    Constant once started: ``address``, ``token_file``, ``tls`` (a folder, empty on loopback), ``socket`` (of the rank
    service of the first node daemon).
    """

    stop_deadline_s = STOP_DEADLINE_S

    def __init__(self, state: Path) -> None:
        self.state = state
        self.address = ""
        self.token_file = state / "token"
        self.tls = ""
        self.socket = ""
        self.services: list[Service] = []
        self._stopping = False

    def __enter__(self) -> EmbeddedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_coordinator(self, *arguments: str, listen: str = "127.0.0.1:0") -> None:
        """Starts the coordinator and waits until it serves. Raises ServiceError with the reason."""
        if is_loopback(split_address(listen)[0]):
            require_loopback()
        database = f"sqlite:///{self.state / 'coordinator' / 'bagua.db'}"
        # All of it comes and goes together: ranks need not outlive a coordinator that is away for long. On one machine,
        # which may sleep, none is away from the others.
        more = ["--fence-after", "0" if is_loopback(split_address(listen)[0]) else "10", *arguments]
        service = self._launch(
            "coordinator",
            "bagua.daemon.coordinator",
            ["--listen", listen, "--state-dir", str(self.state), "--database-url", database, *more],
        )
        ready = service.wait_ready(time.monotonic() + START_DEADLINE_S)
        self.address, self.token_file, self.tls = ready["address"], Path(ready["token_file"]), ready.get("tls", "")

    def start_nodes(
        self, node_ids: Sequence[str], slots: int, *arguments: str, hosts: Sequence[EmbeddedHost] = ()
    ) -> None:
        """Starts daemons side by side; waits until the coordinator knows all. Raises ServiceError with the reason.

        ``hosts``: where each of them runs; none: all on this machine's loopback.
        """
        reach = ["--coordinator", self.address, "--token-file", str(self.token_file)]
        if self.tls:
            reach += ["--tls", self.tls]
        # One user starts and uses this cluster: ranks get the whole environment, as if they were started here.
        common = ["--slots", str(slots), "--state-dir", str(self.state), "--pass-env", "*", *reach, *arguments]
        nodes = [
            self._launch(
                f"node daemon {name}",
                "bagua.daemon.node",
                ["--name", name, "--node-id", name, *common, *(["--data-host", host.address] if host.address else [])],
                host.prefix,
            )
            for name, host in zip(node_ids, hosts or [EmbeddedHost()] * len(node_ids), strict=True)
        ]
        deadline = time.monotonic() + START_DEADLINE_S
        ready = [node.wait_ready(deadline) for node in nodes]
        self.socket = ready[0]["socket"]

    def _launch(self, label: str, module: str, arguments: Sequence[str], prefix: Sequence[str] = ()) -> ServiceProcess:
        with uninterrupted():
            service = ServiceProcess(label, module, arguments, self.state / f"{label.replace(' ', '-')}.log", prefix)
            self.services.append(service)
        return service

    def on_unexpected_end(self, tell: Callable[[str], None], tell_of_node: Callable[[str], None] | None = None) -> None:
        """Calls ``tell`` (from a thread) with words for every service that ends before ``stop``; of node daemons
        ``tell_of_node``, if that is given."""

        def watch(service: Service) -> None:
            words = service.describe_end()
            if not self._stopping:
                (tell if service is self.services[0] else tell_of_node or tell)(words)  # the first is the coordinator

        for service in self.services:
            Thread(target=watch, args=(service,), daemon=True, name=f"watch {service.label}").start()

    def stop(self) -> None:
        """Stops daemons (they stop their ranks), then the coordinator; whatever is left at the deadline is killed."""
        self._stopping = True
        deadline = time.monotonic() + self.stop_deadline_s
        # The daemons first: the coordinator hears how the ranks ended.
        for service in reversed(self.services[1:]):
            service.signal_group(signal.SIGTERM)
        for service in self.services[1:]:
            service.wait(deadline - 0.5)  # the rest is the coordinator's
        for service in self.services[:1]:
            service.signal_group(signal.SIGTERM)
            service.wait(deadline)

    def kill(self, rank_pids: Iterable[int] = ()) -> None:
        """Kills all services and the process groups of these ranks, at once."""
        self._stopping = True
        for service in self.services:
            service.signal_group(signal.SIGKILL)
        for pid in rank_pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # ranks lead process groups of their own
