"""Launchers that start a process as one of several ranks: torchrun, srun, mpirun, pbsdsh. Each has its own variables.

``LAUNCHERS`` is the table. torch's names win wherever they are set: a launcher inside of another one sets them, and so
may a user.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua.base.errors import ConfigError

Environment = Mapping[str, str]

FIRST_PORT, PORTS = 10000, 20000  # Below the ports that Linux gives to connections by itself
DEFAULT_PORT = 29500  # Port of the rendezvous of several hosts, as torch has it
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launcher:
    """A row of the table: variables in which a launcher says where a process stands. Empty: it does not say that.

    ``needs``: without one of them the others mean something else. ``forbids``: with one of them they do. ``job``:
    variables that are alike on all ranks of a job and differ from those of other jobs.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    needs: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    job: tuple[str, ...] = ()

    def started(self, environment: Environment) -> bool:
        """True if the process that has this environment is one of its ranks."""
        there = (self.rank, *self.needs)
        return all(environment.get(name) for name in there) and not any(name in environment for name in self.forbids)


TORCH = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
SRUN = Launcher(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    node_rank="SLURM_NODEID",
    needs=("SLURM_STEP_ID",),  # a batch script has the other variables, too
    forbids=("SLURM_PTY_PORT",),  # an interactive shell: what it starts is no task
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
PBSDSH = Launcher(
    "pbsdsh", "PBS_VNODENUM", "PBS_NP", node_rank="PBS_NODENUM", needs=("PBS_TASKNUM",), job=("PBS_JOBID",)
)
# Innermost first: mpirun runs inside of an allocation of Slurm or PBS, and may use srun to start its own daemons.
LAUNCHERS = (
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "MVAPICH's mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job=("PMI_JOBID",)),
    SRUN,
    Launcher("PMIx", "PMIX_RANK", "", job=("PMIX_NAMESPACE",)),
    PBSDSH,
)


def outer(environment: Environment) -> Launcher | None:
    """The launcher of a cluster that started this process, whether or not torch's names are set, too."""
    return next((row for row in LAUNCHERS if row.started(environment)), None)


def placement(environment: Environment) -> dict[str, str]:
    """RANK, WORLD_SIZE and the other names of torch, as far as the launcher says them in its own. Empty where torch's
    names are set, and where no launcher started this process. Raises ConfigError for what is no place in a job."""
    row = outer(environment)
    if row is None or environment.get("RANK") or environment.get("WORLD_SIZE"):
        return {}
    rank = _number(environment, row.rank)
    world_size = _world_size(row, environment)
    if rank >= world_size:
        raise ConfigError(f"{row.rank}={rank} is no rank of {world_size} ({row.name}): ranks count from 0. [BG908]")
    local = _local_world_size(row, environment)
    found = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local}
    if local:
        found["LOCAL_RANK"], found["NODE_RANK"] = rank % local, rank // local
    elif environment.get(row.local_rank):
        found["LOCAL_RANK"] = _number(environment, row.local_rank)
    return {
        **{name: str(value) for name, value in found.items() if value is not None},
        **_meeting_place(row, environment, world_size == local),
    }


def _number(environment: Environment, name: str) -> int:
    text = environment.get(name, "")
    if not text.strip().isdecimal():
        raise ConfigError(f"Environment variable {name} is {text!r}: it must be a whole number. [BG106]")
    return int(text)


def _world_size(row: Launcher, environment: Environment) -> int:
    if environment.get(row.world_size):
        return _number(environment, row.world_size)
    if row is PBSDSH and (hosts := _pbs_hosts(environment)):  # the file has a line for each slot
        return len(hosts)
    raise ConfigError(
        f"{row.rank}={environment[row.rank]} says that {row.name} started this process as one of several, and nothing "
        "says of how many. Set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT in every process. [BG908]"
    )


def _local_world_size(row: Launcher, environment: Environment) -> int | None:
    """Ranks of this host, if all hosts have as many, numbered one after the other; else None, and the ranks find out
    when they meet. All ranks come to the same answer."""
    if row is not SRUN:
        return _number(environment, row.local_world_size) if environment.get(row.local_world_size) else None
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(set(counts)) != 1:  # hosts with different numbers: the ranks count when they meet
        return None
    # With --distribution=cyclic a host has every so-manieth rank.
    here = [int(text) for text in environment.get("SLURM_GTIDS", "").split(",") if text.isdecimal()]
    first = _number(environment, SRUN.node_rank) * counts[0]
    return counts[0] if here == list(range(first, first + counts[0])) else None


def tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` -> [2, 1]: the different numbers of tasks. Empty for what is no such text."""
    found = [re.fullmatch(r"(\d+)(?:\(x\d+\))?", part) for part in text.split(",")]
    return [int(match[1]) for match in found if match]


def _meeting_place(row: Launcher, environment: Environment, one_host: bool) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, where they can be known and are not set."""
    address = environment.get("MASTER_ADDR") or (LOOPBACK if one_host else first_host(environment))
    if not address:
        return {}
    return {"MASTER_ADDR": address, "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(row, environment))}


def first_host(environment: Environment) -> str:
    """The host of rank 0, as the scheduler names it; empty if that is unknown."""
    nodes = environment.get("SLURM_STEP_NODELIST" if SRUN.started(environment) else "SLURM_JOB_NODELIST", "")
    if environment.get("SLURM_JOB_NUM_NODES") == "1":
        return LOOPBACK
    return first_of(nodes) if nodes else next(iter(_pbs_hosts(environment)), "")


def first_of(hosts: str) -> str:
    """The first name of Slurm's short form: ``gpu[03-07,11],cpu1`` -> gpu03."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts).split(",")[0]


def _pbs_hosts(environment: Environment) -> list[str]:
    """A line for each slot of the job. PBS has the file on the first host alone."""
    try:
        return Path(environment["PBS_NODEFILE"]).read_text().split()
    except (KeyError, OSError):
        return []


def _port(row: Launcher, environment: Environment) -> int:
    """The same on all ranks, and hardly that of another job."""
    reserved = re.match(r"\d+", environment.get("SLURM_STEP_RESV_PORTS", ""))  # Slurm keeps these ports for the step
    if reserved:
        return int(reserved[0])
    known = [environment[name] for name in row.job if environment.get(name)]
    if not known:
        return DEFAULT_PORT
    # From the job's id: all ranks know it, and other jobs get others.
    return FIRST_PORT + int.from_bytes(hashlib.sha256(" ".join(known).encode()).digest()[:4]) % PORTS


def on_one_host(environment: Environment) -> str:
    """Returns words for a command that starts a job on this host alone, if that is hardly meant. Else empty."""
    row = outer(environment)
    size = placement(environment).get("WORLD_SIZE", "1")
    if row is not None and size != "1":
        return f"{row.name} has started this command {size} times, and each time it is a job of its own: call it once"
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1":
        return f"Slurm gave {nodes} nodes, and this job runs on one of them: `bagua slurm run` takes all"
    return ""


def larger_allocation(environment: Environment) -> str:
    """Describes the allocation of several tasks or nodes in which a process trains alone. Empty if there is none."""

    def count(*names: str) -> int:
        return max((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), default=1)

    if job := environment.get("SLURM_JOB_ID"):
        tasks, nodes = count("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), count("SLURM_JOB_NUM_NODES")
        return f"Slurm job {job} has {nodes} nodes and {tasks} tasks" if max(tasks, nodes) > 1 else ""
    if job := environment.get("PBS_JOBID"):
        slots = max(count("PBS_NP"), len(_pbs_hosts(environment)))
        return f"PBS job {job} has {slots} slots" if slots > 1 else ""
    return ""
