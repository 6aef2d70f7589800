"""The injection of faults into a cluster and its job."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bagua.base.daemon_process import daemon_pid
from bagua.base.islands import divide
from bagua.chaos import sockets
from bagua.chaos.patience import alive, descendants, until
from bagua.chaos.plan import KINDS, Fault, Kind
from bagua.cli.cluster.local_cluster import START_DEADLINE_S
from bagua.cli.faults.cluster import ChaosCluster, read_only
from bagua.proto import common_pb2

WAITING = common_pb2.JOB_STATE_WAITING
GARBAGE = bytes(range(255, 191, -1))
SLOW_BYTES_PER_S = 100_000
DEAD_BYTES_PER_S = 1
DELAY_S = 0.05
NEWCOMER_S = 120.0  # Newcomers come so far, with others before them that have failed
DEPTH = 3000  # folders
START_S = 3.0  # of a daemon, in which its keeper is killed


@dataclass
class Trained:
    """The job that is at work. ``folder``: of its diaries. ``nodes``: so many it should have. ``ranks``: pids of ranks
    that are members and thought to be alive, by the name of their node."""

    job_id: str
    folder: Path
    nodes: int
    ranks: dict[str, list[int]]
    island_size: int = 1

    def pids(self) -> list[int]:
        return [pid for pids in self.ranks.values() for pid in pids]


class Injector:
    """Does faults, one at a time. ``goes_on``: says whether these ranks have trained since then. ``regrouped``: whether
    all do that are members now, after it has taken them in."""

    def __init__(
        self,
        cluster: ChaosCluster,
        goes_on: Callable[[list[int], float], bool],
        regrouped: Callable[[Trained, float], bool],
    ) -> None:
        self._cluster = cluster
        self._goes_on = goes_on
        self._regrouped = regrouped

    def play(self, fault: Fault, trained: Trained) -> tuple[str, float, float]:
        """Plays a fault. Returns who it was done to, when it began and when it ended, in monotonic seconds. Who is lost
        by it, or leaves, is no more in ``trained``. Raises ServiceError for a fault that can't be done.
        """
        kind = KINDS[fault.kind]
        node = list(trained.ranks)[fault.node]
        pid = trained.ranks[node][fault.rank]
        rank = f"process {pid} on {node}"
        began = time.monotonic()
        match fault.kind:
            case "kill-rank":
                os.kill(pid, signal.SIGKILL)
                self._lose(trained, node, pid)
                return rank, began, began
            case "silent-rank":
                os.kill(pid, signal.SIGSTOP)
                self._lose(trained, node, pid)
                until(lambda: not alive(pid), "a rank that is stopped is ended by its daemon")
                return rank, began, began
            case "stop-rank":
                with stopped(pid):
                    time.sleep(kind.lasts_s)
                return rank, began, time.monotonic()
            case "kill-daemon":
                os.kill(self._daemon(node), signal.SIGKILL)
            case "kill-keeper":
                self._cluster.nodes.pop(node).process.kill()
                del trained.ranks[node]
            case "other-release":
                self._cluster.nodes.pop(node).process.kill()
                del trained.ranks[node]
                self._meet_other_release(trained)
            case "silent-daemon":
                self._silence(node, trained)
                return node, began, began
            case "stop-daemon":
                with stopped(self._daemon(node)):
                    time.sleep(kind.lasts_s)
            case "stop-keeper":
                with stopped(self._cluster.nodes[node].process.pid):
                    time.sleep(kind.lasts_s)
            case "cut-link" | "corrupt-link" | "slow-link" | "delay-link" | "dead-link":
                self._disturb(fault.kind, self._daemon(node), trained)
            case "deep-tree":
                for place in (self._cluster.state / f"node-{node}" / "jobs").iterdir():
                    resist(place / "code")
                os.kill(self._daemon(node), signal.SIGKILL)
            case "upgrade":
                self._cluster.call(lambda client: client.upgrade(node))
            case "kill-starting-keeper":
                node = self._kill_starting_keeper(fault.chance * START_S)
            case _ if kind.rule:
                self._break_path(kind, node, trained)
                return node, began, began
            case "scale" | "drain" | "pause":
                return self._change(fault.kind, trained, node)
            case _ if kind.phase:
                os.kill(pid, signal.SIGKILL)
                self._lose(trained, node, pid)
                return self._meet_newcomer(fault.kind, trained)
            case _:
                with self._service_fault(fault.kind):
                    time.sleep(kind.lasts_s)
                node = ""
        return node, began, time.monotonic()

    def _change(self, kind: str, trained: Trained, node: str) -> tuple[str, float, float]:
        """Plays a planned change, which must not hurt. Raises ServiceError if it does not come about."""
        job_id, began = trained.job_id, time.monotonic()
        if kind == "pause":
            self._cluster.call(lambda client: client.pause(job_id))
            until(lambda: self._cluster.job(job_id).state == WAITING, "a job that is paused waits")
            time.sleep(KINDS[kind].lasts_s)
            self._cluster.call(lambda client: client.resume(job_id))
            return "", began, time.monotonic()
        if kind == "drain":
            self._cluster.call(lambda client: client.drain(node))
            self._wait_until_left(trained, trained.nodes, node)
            return node, began, began
        less = len(trained.ranks) - 1
        self._cluster.call(lambda client: client.scale(job_id, less))
        return self._wait_until_left(trained, less, ""), began, began

    def _wait_until_left(self, trained: Trained, most: int, drained: str) -> str:
        """Waits until the job has no more nodes than ``most``, and none that is ``drained``. Returns the others."""

        def staying() -> set[str]:
            return {rank.node_id for rank in self._cluster.job(trained.job_id).ranks}

        until(lambda: len(staying()) <= most and drained not in staying(), "nodes have left the job")
        gone = [node for node in trained.ranks if node not in staying()]
        for node in gone:
            pids = trained.ranks.pop(node)
            until(lambda: not any(map(alive, pids)), f"ranks on {node}, which has left, have ended")  # noqa: B023
        return ", ".join(gone)

    def repair(self, fault: Fault, target: str, trained: Trained) -> None:
        """Makes room again for those that have left."""
        if fault.kind == "scale":
            self._cluster.call(lambda client: client.scale(trained.job_id, trained.nodes))
        elif fault.kind == "drain":
            self._cluster.call(lambda client: client.undrain(target))

    def _kill_starting_keeper(self, after_s: float) -> str:
        """The daemon below it, which gets no signal, must end."""
        name, service = self._cluster.launch_node()
        until(lambda: descendants(service.process.pid) != [], "a keeper starts its daemon")
        daemon = descendants(service.process.pid)[0]
        time.sleep(after_s)
        service.process.kill()
        until(lambda: not alive(daemon), "a daemon ends whose keeper was killed while it started")
        return name

    def _meet_other_release(self, trained: Trained) -> None:
        """The job says why it does not grow, and goes on; the node leaves again."""
        name, service = self._cluster.launch_node(other_release=True)
        service.wait_ready(time.monotonic() + START_DEADLINE_S)
        words = "the job says that a node of another release can't talk with it"
        until(lambda: f"{name}: bagua" in self._cluster.job(trained.job_id).growth, words)
        service.process.kill()

    def _break_path(self, kind: Kind, node: str, trained: Trained) -> None:
        """Breaks links of a host. The coordinator decides which hosts are out; the others must go on, meanwhile and
        afterwards. A host that was put out is started anew, as by an operator who has mended its links."""
        assert kind.rule is not None
        rule, firewall = kind.rule, self._cluster.firewalls[node]
        names = list(trained.ranks)
        peer = self._cluster.firewalls[names[names.index(node) - 1]].address if rule.pair else ""
        for _ in range(rule.times or 1):
            refused = rule.refused and firewall.refused(getattr(errno, rule.refused))
            with refused or firewall.dropped(rule.lost, peer):
                if rule.refused:
                    sockets.cut(self._daemon(node), self._cluster.port)
                began = time.monotonic()  # steps before it don't count
                if rule.times:
                    time.sleep(kind.lasts_s)
                else:
                    until(lambda: self._regrouped(trained, began), "the others go on without a host that is cut off")  # noqa: B023
            began = time.monotonic()
            until(lambda: self._regrouped(trained, began), "all go on when a host is no more cut off")  # noqa: B023
        for name in set(names).difference(trained.ranks):
            self._cluster.nodes.pop(name).process.kill()

    def _daemon(self, node: str) -> int:
        return daemon_pid(self._cluster.nodes[node].process.pid)

    def _meet_newcomer(self, kind: str, trained: Trained) -> tuple[str, float, float]:
        """The next newcomer that comes so far meets its signal."""
        number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
        sprung, trap = trained.folder / "sprung", trained.folder / f"trap-{KINDS[kind].phase}"
        sprung.unlink(missing_ok=True)
        trap.with_suffix(".new").write_text(str(int(number)))
        trap.with_suffix(".new").rename(trap)  # so newcomers find it whole
        until(sprung.exists, f"a newcomer {KINDS[kind].phase}", NEWCOMER_S)
        pid, at = map(int, sprung.read_text().split())
        if kind == "stop-newcomer":
            time.sleep(KINDS[kind].lasts_s)
            os.kill(pid, signal.SIGCONT)
        else:
            until(lambda: not alive(pid), "a newcomer that was killed or stopped has ended")
        return f"process {pid}", at / 1e9, time.monotonic()

    def _lose(self, trained: Trained, node: str, pid: int) -> None:
        """Takes the rank out, with the others of its island."""
        trained.ranks[node], _ = divide(trained.ranks[node], trained.island_size, pid.__eq__)
        if not trained.ranks[node]:
            del trained.ranks[node]

    def _silence(self, node: str, trained: Trained) -> None:
        """A daemon that is stopped until the others go on without it, and wakes up: its ranks must end."""
        service, out = self._cluster.nodes.pop(node), trained.ranks.pop(node)
        with stopped(daemon_pid(service.process.pid)):
            began = time.monotonic()  # steps before the stop don't count
            until(lambda: self._goes_on(trained.pids(), began), "the others go on without a daemon that is stopped")
        until(lambda: not any(alive(pid) for pid in out), "ranks of a daemon that was out have ended")
        service.process.kill()

    def _disturb(self, kind: str, pid: int, trained: Trained) -> None:
        """Connections are made anew while somebody joins, so that there may be none at first."""
        port, lasts_s = self._cluster.port, KINDS[kind].lasts_s
        speed = SLOW_BYTES_PER_S if kind == "slow-link" else DEAD_BYTES_PER_S
        deeds: dict[str, Callable[[], int]] = {
            "cut-link": lambda: sockets.cut(pid, port),
            "corrupt-link": lambda: sockets.corrupt(pid, port, GARBAGE),
            "delay-link": lambda: sockets.delay(pid, port, DELAY_S, lasts_s),
        }
        deed = deeds.get(kind, lambda: sockets.pace(pid, port, speed))
        until(lambda: deed() > 0, f"process {pid} has a connection to another host")
        if kind == "slow-link":
            time.sleep(lasts_s)
            sockets.pace(pid, port, sockets.UNLIMITED)
        elif kind == "dead-link":
            generation = self._cluster.job(trained.job_id).generation
            anew = "connections that carry nothing are made anew"
            until(lambda: self._cluster.job(trained.job_id).generation > generation, anew)

    @contextlib.contextmanager
    def _service_fault(self, kind: str) -> Iterator[None]:
        coordinators = self._cluster.coordinators
        leader, database = coordinators.leader, coordinators.database
        if kind in ("kill-coordinator", "kill-leader"):
            leader.process.kill()
            if kind == "kill-leader":
                coordinators.move()
            yield
            coordinators.restart(leader)
        elif kind in ("stop-coordinator", "stop-leader"):
            with stopped(leader.process.pid):
                if kind == "stop-leader":
                    coordinators.move()
                yield
        elif kind == "lock-database":
            with locked(coordinators.file):
                yield
        elif kind == "full-disk":
            with filled(self._cluster.state):
                yield
        elif kind == "read-only":
            with read_only(self._cluster.state):
                yield
        elif kind == "sleep":
            with contextlib.ExitStack() as stack:
                for pid in descendants(os.getpid()):
                    with contextlib.suppress(ProcessLookupError):
                        stack.enter_context(stopped(pid))
                yield
        else:
            assert database is not None
            if kind == "kill-database":
                database.kill()
                yield
                database.start()
            else:
                database.signal(signal.SIGSTOP)
                try:
                    yield
                finally:
                    database.signal(signal.SIGCONT)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops the process while the context lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def resist(tree: Path) -> None:
    """Makes a tree that is hard to remove: folders in each other, and one without permission."""
    tree.mkdir(exist_ok=True)
    (tree / "closed" / "inside").mkdir(parents=True, exist_ok=True)
    (tree / "closed").chmod(0)
    folder = os.open(tree, os.O_RDONLY)
    for _ in range(DEPTH):
        with contextlib.suppress(FileExistsError):
            os.mkdir("a", dir_fd=folder)
        below = os.open("a", os.O_RDONLY, dir_fd=folder)  # no path: it would be longer than the kernel takes
        os.close(folder)
        folder = below
    os.close(folder)


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    """Locks the SQLite database, so that nobody else can write into it."""
    # None: Python begins no transactions by itself.
    with contextlib.closing(sqlite3.connect(database, timeout=10.0, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Fills the disk of ``folder`` while the context lasts."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):  # to the last byte
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        yield
    finally:
        filler.unlink(missing_ok=True)
