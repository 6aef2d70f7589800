"""How each fault is done to a cluster and its job."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bagua.base.daemon_process import daemon_pid
from bagua.base.errors import ServiceError
from bagua.chaos import sockets
from bagua.chaos.plan import KINDS, Fault
from bagua.cli.chaos_cluster import ChaosCluster

GARBAGE = bytes(range(255, 191, -1))
SLOW_BYTES_PER_S = 100_000
TO_NOTICE_S = 60.0
"""A fault that is told nowhere ends at the latest after so long."""


@dataclass
class Trained:
    """The job that is at work. ``folder``: of its diaries. ``ranks``: pids of ranks that are members and thought to be
    alive, by the name of their node."""

    job_id: str
    folder: Path
    ranks: dict[str, list[int]]

    def pids(self) -> list[int]:
        return [pid for pids in self.ranks.values() for pid in pids]


class Injector:
    """Does faults, one at a time. ``goes_on``: says whether the ranks that are left train again."""

    def __init__(self, cluster: ChaosCluster, goes_on: Callable[[list[int], float], bool]) -> None:
        self._cluster = cluster
        self._goes_on = goes_on

    def play(self, fault: Fault, trained: Trained) -> tuple[str, float, float]:
        """(who it was done to, when it began, when it ended) in monotonic seconds. Who is lost by it is no more in
        ``trained``. Raises ServiceError for a fault that can't be done."""
        node = list(trained.ranks)[fault.node]
        pid = trained.ranks[node][fault.rank]
        began = time.monotonic()
        match fault.kind:
            case "kill-rank":
                os.kill(pid, signal.SIGKILL)
                self._lose(trained, node, pid)
                return f"process {pid} on {node}", began, began
            case "silent-rank":
                os.kill(pid, signal.SIGSTOP)
                self._lose(trained, node, pid)
                until(lambda: not alive(pid), "a rank that is stopped is ended by its daemon")
                return f"process {pid} on {node}", began, began
            case "stop-rank":
                with stopped(pid):
                    time.sleep(KINDS[fault.kind].lasts_s)
                return f"process {pid} on {node}", began, time.monotonic()
            case "kill-daemon":
                os.kill(daemon_pid(self._cluster.nodes[node].process.pid), signal.SIGKILL)
            case "kill-keeper":
                self._cluster.nodes.pop(node).process.kill()
                del trained.ranks[node]
            case "silent-daemon":
                self._silence(node, trained)
                return node, began, began
            case "stop-daemon":
                with stopped(daemon_pid(self._cluster.nodes[node].process.pid)):
                    time.sleep(KINDS[fault.kind].lasts_s)
            case "cut-link" | "corrupt-link" | "slow-link":
                self._disturb(fault.kind, daemon_pid(self._cluster.nodes[node].process.pid))
            case _:
                with self._service_fault(fault.kind):
                    time.sleep(KINDS[fault.kind].lasts_s)
                node = ""
        return node, began, time.monotonic() if KINDS[fault.kind].lasts_s else began

    def _lose(self, trained: Trained, node: str, pid: int) -> None:
        trained.ranks[node].remove(pid)
        if not trained.ranks[node]:
            del trained.ranks[node]

    def _silence(self, node: str, trained: Trained) -> None:
        """A daemon that is stopped until the others go on without it, and wakes up: its ranks must end."""
        service, out = self._cluster.nodes.pop(node), trained.ranks.pop(node)
        began = time.monotonic()
        with stopped(daemon_pid(service.process.pid)):
            until(lambda: self._goes_on(trained.pids(), began), "the others go on without a daemon that is stopped")
        until(lambda: not any(alive(pid) for pid in out), "ranks of a daemon that was out have ended")
        service.process.kill()

    def _disturb(self, kind: str, pid: int) -> None:
        port = self._cluster.port
        if kind == "cut-link":
            found = sockets.cut(pid, port)
        elif kind == "corrupt-link":
            found = sockets.corrupt(pid, port, GARBAGE)
        else:
            found = sockets.pace(pid, port, SLOW_BYTES_PER_S)
            time.sleep(KINDS[kind].lasts_s)
            sockets.pace(pid, port, sockets.UNLIMITED)
        if not found:
            raise ServiceError(f"Process {pid} has no connection to another host.")

    @contextlib.contextmanager
    def _service_fault(self, kind: str) -> Iterator[None]:
        coordinator = self._cluster.coordinator
        assert coordinator is not None
        if kind == "kill-coordinator":
            coordinator.process.kill()
            yield
            self._cluster.start_coordinator()
        elif kind == "stop-coordinator":
            with stopped(coordinator.process.pid):
                yield
        elif kind == "lock-database":
            with locked(self._cluster.state / "coordinator" / "bagua.db"):
                yield
        else:
            with filled(self._cluster.state):
                yield


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped while the context lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Nobody else can write into the SQLite database."""
    with contextlib.closing(sqlite3.connect(database, timeout=10.0, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """The disk of ``folder`` has no room."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        yield
    finally:
        filler.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], what: str, within_s: float = TO_NOTICE_S) -> None:
    """Waits. Raises ServiceError if that takes too long."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(f"Not within {within_s:g} s: {what}.")
        time.sleep(0.05)
