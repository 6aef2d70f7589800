"""``bagua slurm run``: ``bagua run`` over the nodes of an allocation of Slurm.

It runs on the first node, as a batch script does, and starts a node daemon on each node in one step of srun. What they
need to come together (address, token, certificates) lies in a file of mode 0600, in a folder that all nodes see.

The end of the allocation is announced by a signal: a checkpoint, the end of the job, and a new start. SIGUSR1 comes
before the time limit (``sbatch --signal=B:USR1@120``). SIGTERM comes with a preemption, a requeue, a cancellation, and
the time limit itself.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from bagua.base import checkpoint_folder, launchers
from bagua.base.address import is_loopback
from bagua.base.errors import ConfigError, UsageError
from bagua.base.paths import make_private_dir, state_dir, write_private
from bagua.base.trees import remove_tree
from bagua.cli.cluster.hosts import RemoteService, Way
from bagua.hosts.end import ENDING, FAILED, Order

if TYPE_CHECKING:
    from bagua.cli.cluster.interrupts import Interrupts
    from bagua.cli.display.terminal import Terminal

REQUEUE_DEADLINE_S = 60.0
SWEEP_DEADLINE_S = 10.0
COME_S = 2.0  # between the ends of two processes of a job that Slurm ends
# Options of srun in the environment of a batch script, which are about the ranks: a daemon has a node to itself.
FORGOTTEN = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION"),
    *("SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPU_BIND", "SLURM_GPU_BIND"),
)


@dataclass
class SrunWay(Way):
    """Way with one step of srun that has a task on each node."""

    job: str
    hosts: int
    address: str
    shared: Path
    srun: str = "srun"
    squeue: str = "squeue"
    ends_by_signal = True
    _folder: Path | None = field(default=None, init=False)
    _log: Path | None = field(default=None, init=False)

    def start(self, order: Order, state: Path) -> list[RemoteService]:
        """Starts daemons. Slurm names the nodes."""
        self._log = state / "nodes.log"
        sweep(make_private_dir(self.shared), self.squeue)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self.job}-", dir=self.shared))
        path = self._folder / "order"
        write_private(path, f"{order.line()}\n".encode())
        command = [
            # --overlap: the batch script has the nodes. The others: a daemon that is lost takes no other with it.
            *(*self.srun.split(), "--overlap", f"--nodes={self.hosts}", f"--ntasks={self.hosts}"),
            *("--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--job-name=bagua"),
            *(sys.executable, "-P", "-m", "bagua.hosts.end", "--order", str(path)),
        ]
        command = ["env", *(f"--unset={name}" for name in FORGOTTEN), *command]
        return [RemoteService("step of node daemons", command, "", self._log, why=" (srun)")]

    def close(self) -> None:
        if self._folder is not None:
            remove_tree(self._folder)

    def failure(self) -> str:
        # One step has all nodes, and goes on without one.
        found = sorted(self._folder.glob(f"{FAILED}*")) if self._folder is not None else []
        if not found or self._log is None:
            return ""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if not line.startswith("srun: ")]
        words = [f"The node daemon of {path.name.removeprefix(FAILED)} failed: {path.read_text()}" for path in found]
        return " ".join([*words, *(f"Last words of all: {line.strip()}" for line in lines[-1:])])

    def announce_end(self) -> None:
        if self._folder is not None and self._folder.is_dir():
            (self._folder / ENDING).touch()


def sweep(shared: Path, squeue: str) -> None:
    """Removes the folders of jobs that Slurm has no more: `scancel` and `scontrol requeue` kill a batch script
    before it can remove its own. Where Slurm does not answer, they stay until the next time."""
    # Named after the id of their job.
    folders = [path for path in shared.iterdir() if path.name.partition("-")[0].isdecimal()]
    if not folders:
        return
    command = [*squeue.split(), "--noheader", f"--user={os.getuid()}", "--format=%A"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SWEEP_DEADLINE_S)
        there = set(done.stdout.split())
        for path in folders:
            if path.name.partition("-")[0] not in there:
                remove_tree(path)


def srun_way(nodes: int | None, address: str, environment: Mapping[str, str] = os.environ) -> SrunWay:
    """The nodes of this allocation, ``nodes`` of them if that is given. Raises UsageError outside of one, for more
    nodes than it has, and where this node has no address for the others."""
    job = environment.get("SLURM_JOB_ID")
    if not job:
        raise UsageError(
            "There is no allocation of Slurm here. Call `bagua slurm run` in a batch script, or at once: `salloc "
            "-N 2 bagua slurm run train.py`. [BG916]"
        )
    if launchers.SRUN.started(environment) and _number(environment, "SLURM_STEP_NUM_TASKS") > 1:
        raise UsageError(
            "srun has started this command several times. Call `bagua slurm run` once, without srun: it starts a "
            "daemon on each node by itself. [BG916]"
        )
    parts = _number(environment, "SLURM_HET_SIZE")
    if parts > 1 and nodes is None:
        groups = ",".join(map(str, range(parts)))
        raise UsageError(
            f"Slurm job {job} is heterogeneous, and `bagua slurm run` takes nodes of its first component alone: say "
            f"how many with -N, or start a rank with each task of all components: srun --het-group={groups} python "
            "train.py. [BG916]"
        )
    has = _number(environment, "SLURM_JOB_NUM_NODES")
    if nodes is not None and nodes > has:
        raise UsageError(
            f"-N {nodes}: Slurm job {job} has {has} nodes. Ask Slurm for more (sbatch -N {nodes}). [BG916]"
        )
    count = nodes or has
    found = address or ("127.0.0.1" if count == 1 else own_address(environment))
    return SrunWay(job, count, found, state_dir() / "slurm", environment.get("BAGUA_SRUN") or "srun")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "1")
    return int(text) if text.isdecimal() else 1


def own_address(environment: Mapping[str, str]) -> str:
    """The address of this node for the others, by the name that Slurm has for it. Raises UsageError."""
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        # Without a type each address would come three times.
        found = dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError as error:
        raise UsageError(f"{name} means no address here ({error.strerror}): --address says one. [BG916]") from None
    beyond = [address for address in found if not is_loopback(address)]
    if not beyond and not name.startswith("127."):
        raise UsageError(
            f"{name} is this machine's loopback here: --address says one by which other nodes reach it. [BG916]"
        )
    return next(iter(beyond or found))


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of ranks that Slurm was asked for: tasks of a node, else its GPUs, else 1. Raises UsageError
    for nodes that differ.
    """
    tasks = environment.get("SLURM_NTASKS_PER_NODE", "")
    if tasks.isdecimal():
        return int(tasks)
    counts = launchers.tasks_per_node(environment.get("SLURM_TASKS_PER_NODE", ""))
    if len(set(counts)) > 1:
        raise UsageError(
            f"Slurm gave the nodes different numbers of tasks ({environment['SLURM_TASKS_PER_NODE']}). Say "
            "--ntasks-per-node, here or to Slurm. [BG916]"
        )
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    if counts and counts[0] > 1:
        return counts[0]
    return int(gpus) if gpus.isdecimal() and int(gpus) else 1


def check_first_node(ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """salloc leaves its command on the login node: becomes a step on the allocation's first node then."""
    first = environment.get("SLURM_JOB_NODELIST", "")
    if environment.get("SLURM_JOB_ID") and first and "SLURMD_NODENAME" not in environment:
        _execute(launchers.first_of(first), ranks)


def _execute(node: str, ranks: int) -> NoReturn:
    terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    place = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", *terminal]
    command = [*(os.environ.get("BAGUA_SRUN") or "srun").split(), *place, sys.executable, "-P", "-m", "bagua.cli.main"]
    unset = [f"--unset={name}" for name in FORGOTTEN]
    # The step has one task: it says nothing of the ranks any more.
    words = [*sys.argv[1:3], "--nproc-per-node", str(ranks), *sys.argv[3:]]
    os.execvp("env", ["env", *unset, *command, *words])


def requeue(job: str) -> None:
    """Has Slurm start the job again. Raises ConfigError with Slurm's words."""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=REQUEUE_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"Slurm job {job} can't be requeued: {error} [BG916]") from None
    if done.returncode:
        raise ConfigError(f"Slurm job {job} can't be requeued: {done.stderr.strip()} [BG916]")


# After SIGTERM Slurm waits half a minute by default (KillWait).
CHECKPOINT_PATIENCE_S = {signal.SIGUSR1: 600.0, signal.SIGTERM: 25.0}


class Announcements:
    """Answers these signals once the job runs. ``ending``: one has come."""

    def __init__(self, way: Way, interrupts: Interrupts, terminal: Terminal, checkpoints: str) -> None:
        """``checkpoints``: the folder of the job's checkpoints; empty if it has none."""
        self.ending: signal.Signals | None = None
        self._come = Event()
        self._way = way
        self._interrupts = interrupts
        interrupts.excuse = self.has_come
        self._terminal = terminal
        self._checkpoints = Path(checkpoints) if checkpoints else None
        for number in CHECKPOINT_PATIENCE_S:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupts.follower is None or self.ending is not None:
            self._interrupts.end(number)  # still starting, or the second one
            return
        self.ending = signal.Signals(number)
        self._come.set()
        Thread(target=self._end, args=(self.ending,), daemon=True, name="end of the allocation").start()

    def has_come(self) -> bool:
        """True if the end was announced, or is within a moment: Slurm signals one process after the other."""
        return self._come.wait(COME_S)

    @property
    def number(self) -> int:
        """The signal that has come."""
        assert self.ending is not None
        return self.ending

    def words(self) -> str:
        """Why the job is over although nothing of it has failed."""
        again = "" if self._checkpoints is None else " Started again, the job goes on from its last checkpoint."
        return (
            f"Slurm has ended job {self._way.job} and its processes ({signal.Signals(self.number).name}): scancel, the "
            f"time limit, or a preemption.{again} [BG917]"
        )

    def _end(self, number: signal.Signals) -> None:
        self._way.announce_end()
        self._interrupts.reason = f"Slurm job {self._way.job} ends ({number.name})"
        self._terminal.note(f"{number.name}: Slurm job {self._way.job} is about to end.")
        try:
            if self._checkpoints is not None:
                self._terminal.note(self._save(self._checkpoints, CHECKPOINT_PATIENCE_S[number]))
        except OSError as error:
            self._terminal.note(f"No checkpoint can be asked for: {error}")
        finally:
            self._interrupts.end(number)

    def _save(self, folder: Path, patience_s: float) -> str:
        """Asks for a checkpoint and waits for it. Raises OSError."""
        if not folder.is_dir():
            return f"There is no checkpoint: the script has made no Checkpointer for {folder}."
        checkpoint_folder.request(folder)

        def there() -> bool:
            step = checkpoint_folder.answered(folder)
            return bool(step) and (folder / checkpoint_folder.name_of(step)).is_dir()

        done = _wait(there, patience_s, self._job_ended)
        words = f"The checkpoint of step {checkpoint_folder.answered(folder)} is written." if done else ""
        checkpoint_folder.forget_request(folder)
        return words or "No checkpoint was written before the end: the job goes on from the one before."

    def _job_ended(self) -> bool:
        from bagua.client.describe import ENDED

        follower = self._interrupts.follower
        return follower is None or follower.job.state in ENDED

    def start_again(self) -> None:
        """Has Slurm start the job again if its time was over. After SIGTERM Slurm does so by itself, or somebody wants
        the end. Raises ConfigError."""
        if self.ending == signal.SIGUSR1:
            self._terminal.note(f"Slurm job {self._way.job} is queued again.")
            requeue(self._way.job)


def _wait(done: Callable[[], bool], patience_s: float, hopeless: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + patience_s
    while not (found := done()) and time.monotonic() < deadline and not hopeless():
        time.sleep(0.1)
    return found
