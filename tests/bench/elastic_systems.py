"""The systems of ``elastic_peers.py``: how each is started on this machine, and what a fault of each kind is there.

A *host* is a set of processes on loopback: Bagua's keeper, daemon and rank; torchrun's agent and its rank; torchft's
replica group, which is one process with its manager in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bagua.base.daemon_process import daemon_pid
from bagua.base.errors import ServiceError

sys.path.insert(0, str(Path(__file__).parent))

from elastic_rig import RANK_MAIN, SILENCE_S, Rig, Unmeasured, read

FAULTS = {
    "rank": "SIGKILL of 1 of {ranks} ranks of a host",
    "host": "SIGKILL of 1 of {hosts} hosts with one rank each",
    "silent": "SIGSTOP of 1 of {hosts} hosts with all in it",
    "daemon": "SIGKILL of the daemon, below {ranks} ranks",
    "join": "one more host joins {hosts}",
}
ON_ONE_HOST = ("rank", "daemon")
STOP_WITHIN_S = 20.0


@dataclass(frozen=True)
class Settings:
    """``silence_s``: after so long without a word this system gives up a host."""

    silence_s: float
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each attempt of torchrun has a store of its own. With the one that attempts share by default (torch 2.13) an agent
that joins waits for an address that nobody tells again, and ranks may find addresses of the former attempt."""
TORCHRUN_5S = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=1"
SETTINGS = {
    "bagua": Settings(SILENCE_S),
    # The others of a rank that is silent wait for torch's default timeout of an operation.
    "torchrun": Settings(1800.0, env=OWN_STORE),
    "torchrun-5s": Settings(5.0, (TORCHRUN_5S,), {**OWN_STORE, "BENCH_TIMEOUT_S": "5"}),
    # The limit is that of Gloo's operations, as in its examples. The heartbeat is 5 s as well.
    "torchft": Settings(5.0, ("--join_timeout_ms", "10000")),
    "torchft-1s": Settings(
        5.0,
        ("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"),
        # Its managers ask a lost lighthouse again after a 60th of their quorum's minute. By default they never do.
        {"TORCHFT_QUORUM_RETRIES": "59"},
    ),
}
MODULES = {"bagua": "bagua.torch_api", "torchrun": "torch.distributed.run", "torchft": "torchft"}


@dataclass(frozen=True)
class Shape:
    """``room``: hosts that may be there at the most. ``island``: so many ranks share a sharded model."""

    hosts: int
    ranks: int
    room: int
    island: int = 1

    @staticmethod
    def of(fault, options):
        hosts, ranks = (1, options.ranks) if fault in ON_ONE_HOST else (options.hosts, 1)
        return Shape(hosts, ranks, hosts + (fault == "join"), options.island_size)

    @property
    def members(self):
        return self.hosts * self.ranks


@dataclass(frozen=True)
class Struck:
    """A fault: when, the ranks that it took, and how many take part when all is well again."""

    at: float
    victims: frozenset[int]
    ranks: int


class System(ABC):
    """One of them at work. ``processes``: those that it can't do without."""

    kind = ""
    stop_signal = signal.SIGTERM

    def __init__(self, name, python, shape, arguments, log):
        """``arguments``: of elastic_rank.py, the folder of its diaries first."""
        self.settings, self.python, self.shape, self.log = SETTINGS[name], python, shape, log
        self.folder = Path(arguments[0])
        self.program = [str(RANK_MAIN), self.kind, *arguments]
        self.arguments = arguments
        self.processes = []
        self._stopped = []

    @abstractmethod
    def begin(self):
        """Starts it, without waiting for its ranks."""

    @abstractmethod
    def host(self, number):
        """The processes of this host, its ranks last."""

    def island(self):
        """The pids of an island other than the first."""
        raise Unmeasured("its ranks hold no sharded models here")

    @abstractmethod
    def add_host(self): ...

    @abstractmethod
    def kill_daemon(self): ...

    def strike(self, fault):
        """Does it. Not to the first host or rank: where torchrun has its store, its loss ends the job."""
        ranks, began = set(read(self.folder)), time.monotonic()
        victims = set()
        if fault == "rank":
            victims = self.island() if self.shape.island > 1 else {sorted(ranks)[1]}
            began = time.monotonic()
            os.kill(max(victims), signal.SIGKILL)
        elif fault in ("host", "silent"):
            pids = self.host(1)
            victims = ranks & set(pids)
            began = time.monotonic()
            self.strike_host(pids, fault)
        elif fault == "daemon":
            self.kill_daemon()
        else:
            self.add_host()
        return Struck(began, frozenset(victims), self.shape.members - len(victims) + (fault == "join"))

    def strike_host(self, pids, fault):
        if fault == "silent":
            self._stopped += pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL if fault == "host" else signal.SIGSTOP)

    def spawn(self, *command, **more):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1"}
        env |= {**self.settings.env, **more}
        process = subprocess.Popen(command, env=env, stdout=self.log, stderr=self.log, start_new_session=True)
        self.processes.append(process)
        return process

    def has_ended(self):
        return all(process.poll() is not None for process in self.processes)

    def end(self):
        """Ends all of it, ranks without a parent, too."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, self.stop_signal)
        for process in self.processes:
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pid in read(self.folder):
            with contextlib.suppress(OSError):
                if str(self.folder) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)


class Bagua(System):
    kind = "bagua"

    def begin(self):
        self._state = tempfile.TemporaryDirectory(prefix="bagua-peers-")
        self._rig = Rig(Path(self._state.name), self.shape.ranks, self.folder, self.arguments[1:], self.shape.island)
        self._rig.start_nodes(self.shape.hosts)
        self._rig.start_job(most=self.shape.room, respawn=0)

    def host(self, number):
        name, service = list(self._rig.nodes.items())[number]
        ranks = [pid for pid, node in self._rig.ranks().items() if node == name]
        return [service.process.pid, daemon_pid(service.process.pid), *ranks]

    def strike_host(self, pids, fault):
        """Its keeper takes all with it."""
        super().strike_host(pids[:1] if fault == "host" else pids, fault)

    def island(self):
        return set(self._rig.islands()[1])

    def kill_daemon(self):
        """The daemon proper: its keeper starts it again."""
        os.kill(daemon_pid(next(iter(self._rig.nodes.values())).process.pid), signal.SIGKILL)

    def add_host(self):
        self._rig.start_nodes(self.shape.room)

    def has_ended(self):
        return False

    def end(self):
        super().end()
        if hasattr(self, "_rig"):
            self._rig.end()
        for path in Path(self._state.name).glob("*.log"):
            self.log.write(b"%s:\n%s" % (path.name.encode(), path.read_bytes()))
        self._state.cleanup()


class Torchrun(System):
    kind = "torchrun"

    def begin(self):
        self._endpoint = f"127.0.0.1:{free_port()}"
        for _ in range(self.shape.hosts):
            self._start_agent()

    def _start_agent(self):
        first = not self.processes
        place = ["--standalone", "--nproc-per-node", str(self.shape.ranks)]
        if self.shape.room > 1:
            least = self.shape.hosts if self.shape.room > self.shape.hosts else self.shape.hosts - 1
            conf = ",".join((f"is_host={int(first)}", *self.settings.options))
            place = ["--nnodes", f"{least}:{self.shape.room}", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
            place += ["--rdzv-backend", "c10d", "--rdzv-id", "bench", "--rdzv-endpoint", self._endpoint]
            place += ["--rdzv-conf", conf]
        self.spawn(self.python, "-m", "torch.distributed.run", *place, "--max-restarts", "3", *self.program)

    def host(self, number):
        agent = self.processes[number].pid
        return [agent, *(pid for pid in read(self.folder) if parent(pid) == agent)]

    def kill_daemon(self):
        """Its agent: the parent of the ranks."""
        self.processes[0].kill()

    def has_ended(self):
        return super().has_ended() and not any(parent(pid) for pid in read(self.folder))

    def add_host(self):
        self._start_agent()


class Torchft(System):
    kind = "torchft"
    stop_signal = signal.SIGKILL

    def begin(self):
        self._address = f"127.0.0.1:{free_port()}"
        self._start_lighthouse()
        for _ in range(self.shape.members // self.shape.island):
            self.add_host()

    def _start_lighthouse(self):
        program = str(Path(self.python).with_name("torchft_lighthouse"))
        self._lighthouse = self.spawn(program, "--bind", self._address, "--min_replicas", "1", *self.settings.options)

    def _groups(self):
        return [process for process in self.processes if process.args[0] == self.python]

    def host(self, number):
        return [self._groups()[number].pid]

    def kill_daemon(self):
        """The lighthouse. Nobody starts it again, so this does: at once, as a supervisor of its host would."""
        self._lighthouse.kill()
        self._lighthouse.wait()
        self._start_lighthouse()

    def add_host(self):
        size, port = self.shape.island, str(free_port())
        place = {"GROUP": str(len(self._groups()) // size), "WORLD_SIZE": str(size), "MASTER_PORT": port}
        place |= {"TORCHFT_LIGHTHOUSE": f"http://{self._address}", "LOGLEVEL": "ERROR"}
        for rank in range(size):
            self.spawn(self.python, *self.program, RANK=str(rank), **place)

    def island(self):
        size = self.shape.island
        return {process.pid for process in self._groups()[size : 2 * size]}

    def has_ended(self):
        return all(process.poll() is not None for process in self._groups())


def parent(pid):
    """Of this process; 0: it has ended."""
    try:
        state, number = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(number)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


KINDS = {made.kind: made for made in (Bagua, Torchrun, Torchft)}


@contextlib.contextmanager
def started(name, python, shape, arguments, log):
    """The system at work. Leaving the context ends all of it. Raises Unmeasured."""
    with log.open("ab") as out:
        system = KINDS[name.partition("-")[0]](name, python, shape, arguments, out)
        try:
            system.begin()
            yield system
        except (ServiceError, ProcessLookupError) as error:
            raise Unmeasured(str(error)) from error
        finally:
            system.end()
