"""The services that ``bagua chaos`` starts, kills and starts again, in a folder of their own: node daemons, and one
coordinator over SQLite or two over one PostgreSQL behind an address that moves."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import bagua
from bagua.base.errors import ServiceError, UnavailableError
from bagua.base.security import read_token
from bagua.base.trees import walk_files
from bagua.chaos.firewall import Firewall
from bagua.chaos.patience import until
from bagua.chaos.plan import FENCE_AFTER_S
from bagua.chaos.relay import Relay
from bagua.cli.cluster.local_cluster import START_DEADLINE_S, STOP_DEADLINE_S, ServiceProcess
from bagua.cli.faults.postgres import Postgres
from bagua.client import Client
from bagua.proto import job_pb2

_CLONE_NEWNS = 0x00020000
DISK_BYTES = 64 << 20
_MOST_FILES = 100_000  # that are looked at for logs, where a fault has made trees
T = TypeVar("T")


class ChaosCluster:
    """Coordinators and node daemons. ``nodes``: those that are thought to be alive, by name. ``firewalls``: of all
    nodes, if these are wanted. Leaving the context ends all of them, and all ranks."""

    def __init__(self, state: Path, slots: int, postgresql: bool = False, walled: bool = False) -> None:
        """Raises ServiceError if there is no PostgreSQL."""
        self.state = state
        self.slots = slots
        self.nodes: dict[str, ServiceProcess] = {}
        self.firewalls: dict[str, Firewall] = {}
        self._walled = walled
        self._started = 0
        self._all: list[ServiceProcess] = []
        self.coordinators = Coordinators(state, self._launch, postgresql)

    def __enter__(self) -> ChaosCluster:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._all:
            service.signal_group(signal.SIGCONT)  # a process that is stopped answers no SIGTERM
        deadline = time.monotonic() + STOP_DEADLINE_S
        for service in reversed(self._all):
            service.signal_group(signal.SIGTERM)
        for service in self._all:
            service.wait(deadline)
        self.coordinators.close()
        for firewall in self.firewalls.values():
            firewall.close()

    def start_node(self) -> None:
        """Starts a daemon under a new name. Raises ServiceError."""
        name, service = self.launch_node()
        service.wait_ready(time.monotonic() + START_DEADLINE_S)
        self.nodes[name] = service

    def launch_node(self, other_release: bool = False) -> tuple[str, ServiceProcess]:
        """Returns the new name, and the keeper, as soon as there is one. ``other_release``: with the next wire
        version."""
        name = f"node-{self._started}"
        self._started += 1
        reach = ["--coordinator", self.coordinators.address, "--token-file", str(self.coordinators.token)]
        arguments = ["--name", name, "--node-id", name, "--slots", str(self.slots), "--state-dir", str(self.state)]
        reach += ["--pass-env", "*", "--no-measure-ring"]  # hosts keep their order: jobs are compared bit by bit
        prefix: Sequence[str] = ()
        if self._walled:
            # Each node has an address of its own, by which rules tell it from others.
            firewall = Firewall(name, f"127.0.{self._started // 250 + 1}.{self._started % 250 + 1}", self.port)
            self.firewalls[name], prefix = firewall, firewall.prefix
            reach += ["--data-host", firewall.address]
        if other_release:
            prefix = [*prefix, "env", "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={next_release(self.state / 'next')}"]
        return name, self._launch(f"daemon {name}", "bagua.daemon.node", [*arguments, *reach], prefix)

    def _launch(self, label: str, module: str, arguments: list[str], prefix: Sequence[str] = ()) -> ServiceProcess:
        service = ServiceProcess(label, module, arguments, self.state / f"{label.replace(' ', '-')}.log", prefix)
        self._all.append(service)
        return service

    def call(self, work: Callable[[Client], T]) -> T:
        """The coordinator's answer. It may be away for a while. Raises ServiceError."""
        found: list[T] = []

        def answers() -> bool:
            with contextlib.suppress(UnavailableError):
                with Client(self.coordinators.address, token=read_token(self.coordinators.token)) as client:
                    found.append(work(client))
            return bool(found)

        until(answers, "a coordinator answers")
        return found[0]

    def job(self, job_id: str) -> job_pb2.Job:
        return self.call(lambda client: client.get(job_id))

    def connected(self, names: Iterable[str]) -> bool:
        """The coordinator hears all of these nodes."""
        nodes = self.call(lambda client: list(client.nodes()))
        return {node.node_id for node in nodes if node.connected} >= set(names)

    @property
    def port(self) -> int:
        """The coordinators', as daemons see it."""
        return int(self.coordinators.address.rpartition(":")[2])


def next_release(folder: Path) -> Path:
    """A folder with a package of this one's files, by links, that has the next wire version."""
    if not folder.exists():
        shutil.copytree(
            *(Path(bagua.__file__).parent, folder / "bagua"),
            copy_function=os.symlink,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        module = folder / "bagua" / "csrc" / "wire_version.py"
        text = module.read_text()
        module.unlink()  # it is a link: writing would change this package
        module.write_text(f"{text}\nWIRE_VERSION += 1\n")
    return folder


def copy_logs(source: Path, target: Path, names: str) -> None:
    """Copies the files below ``source`` that are named so, each into the same folder below ``target``."""
    for path in [Path(entry) for entry in walk_files(source, _MOST_FILES) if fnmatch.fnmatch(entry.name, names)]:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


@contextlib.contextmanager
def private_disk(folder: Path) -> Iterator[None]:
    """Mounts a small disk of its own on ``folder``, which this process and its children alone see: the kernel removes
    it with the last of them. Needs root. Raises ServiceError."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        raise ServiceError(
            "The kernel gives this process no mount namespace: leave full-disk and read-only out (--kinds). [BG003]"
        )
    _mount("mount", "--make-rprivate", "/")  # else what is mounted here shows in the machine's name space
    _mount("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(folder))
    try:
        yield
    finally:
        _mount("umount", "--lazy", str(folder))  # lazy: files are open there


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Lets nobody open files below the private disk ``folder`` to write; those that are open stay so."""
    _mount("mount", "--bind", str(folder), str(folder))
    try:
        _mount("mount", "-o", "remount,bind,ro", str(folder))
        yield
    finally:
        _mount("umount", "--lazy", str(folder))


def _mount(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServiceError(
            f"No disk can be mounted here, leave full-disk and read-only out (--kinds): {done.stderr.strip()} [BG003]"
        )


Launch = Callable[[str, str, list[str]], ServiceProcess]

# A newcomer that is killed on purpose says nothing about the next one.
REJOIN_S = 1.0
# Coordinators come and go here all the time: one that comes back need not wait long before it gives a lost node up.
OUTAGE_S = 10.0


class Coordinators:
    """``address``: at which daemons and clients reach the one that leads; constant once they run. The first one leads
    until another takes over."""

    def __init__(self, state: Path, launch: Launch, postgresql: bool) -> None:
        """Raises ServiceError if there is no PostgreSQL."""
        os.environ["BAGUA_COORDINATOR_REJOIN_S"] = f"{REJOIN_S:g}"
        os.environ["BAGUA_COORDINATOR_OUTAGE_S"] = f"{OUTAGE_S:g}"
        self.database = Postgres() if postgresql else None
        self.file = state / "coordinator" / "bagua.db"
        self.token = state / "token"
        self._relay = Relay() if postgresql else None
        self._launch = launch
        self._folders: Sequence[Path] = [state / "one", state / "two"] if postgresql else [state]
        self._addresses = ["127.0.0.1:0"] * len(self._folders)
        self._processes: list[ServiceProcess] = []
        self._leads = 0

    def close(self) -> None:
        """Ends the database after the coordinators have ended."""
        if self._relay is not None:
            self._relay.close()
        if self.database is not None:
            self.database.close()

    def start(self) -> None:
        """Starts all coordinators. Raises ServiceError."""
        self._processes = [self._start(index) for index in range(len(self._folders))]
        self._point()

    @property
    def address(self) -> str:
        return self._addresses[0] if self._relay is None else self._relay.address

    @property
    def leader(self) -> ServiceProcess:
        return self._processes[self._leads]

    def restart(self, dead: ServiceProcess) -> None:
        """Starts it again where it was."""
        index = self._processes.index(dead)
        self._processes[index] = self._start(index)

    def move(self) -> None:
        """Daemons and clients find the other coordinator from now on: it will lead."""
        self._leads = 1 - self._leads
        self._point()

    def _point(self) -> None:
        if self._relay is not None:
            self._relay.move(self._addresses[self._leads])

    def _start(self, index: int) -> ServiceProcess:
        folder = self._folders[index]
        url = f"sqlite:///{self.file}" if self.database is None else self.database.url
        arguments = ["--listen", self._addresses[index], "--state-dir", str(folder), "--database-url", url]
        label = "coordinator" if len(self._folders) == 1 else f"coordinator {folder.name}"
        service = self._launch(
            label,
            "bagua.daemon.coordinator",
            [*arguments, "--token-file", str(self.token), "--fence-after", f"{FENCE_AFTER_S:g}"],
        )
        self._addresses[index] = service.wait_ready(time.monotonic() + START_DEADLINE_S)["address"]
        return service
