"""A daemon for scripts that were not started by one: torchrun, srun, mpirun, ``torch.multiprocessing.spawn``, plain
``python``.

Rank 0 starts an ephemeral cluster (``bagua.daemon.ephemeral``: coordinator, node daemon, and a job whose ranks join by
themselves), or asks the one of a former world on this host for another job. The first rank of every other host starts a
node daemon. Their messages to find each other go through the store of
``torch.distributed``'s env:// rendezvous, which anybody may read and change (``meeting.py``): the services of two hosts
prove to each other that they hold the job's secret, and the ranks carry their messages (``enroll/exchange.py``). No
secret is in a rank, and no gradient in the store.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import distributed
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from bagua.base import launchers
from bagua.base.address import require_loopback
from bagua.base.errors import BaguaError, ConfigError, ServiceError
from bagua.torch_api.job import environment
from bagua.torch_api.job.connection import load_core
from bagua.torch_api.job.daemon import DaemonClient
from bagua.torch_api.job.lifeline import Lifeline
from bagua.torch_api.job.meeting import DEADLINE_S, Meeting, Superseded, text_of
from bagua.torch_api.job.service_process import LeashedService
from bagua.torch_api.job.session import Session

LOG = logging.getLogger("bagua")

START_DEADLINE_S = 240.0
SOCKET_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INSECURE = "BAGUA_INSECURE_RENDEZVOUS"


@dataclass(frozen=True)
class Place:
    """Place of this process in the job."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def nnodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    def first_rank(self, host: int) -> str:
        """The rank that speaks for a host, in words."""
        return f"Rank {host * self.local_world_size}"


def join(store: Store | None) -> Session:
    """Starts missing services and joins. Raises BuildError, ConfigError, ServiceError, CommunicationError."""
    environment.complete()
    if store is None:
        environment.show()  # torch's env:// reads it
    rank, world_size = environment.get_rank(), environment.get_world_size()
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world_size} don't fit: ranks count from 0 to WORLD_SIZE - 1. [BG908]"
        )
    if world_size == 1:
        if larger := launchers.larger_allocation(os.environ):
            LOG.warning(
                "This process trains alone, as a world of one, but %s. Start every rank of the job: with `srun python "
                "SCRIPT`, mpirun, or `bagua slurm run SCRIPT`.",
                larger,
            )
        return _join_alone()
    session = _join_others(rank, world_size, store)
    # Rank 0 listened at MASTER_PORT, and does so no more: who goes on to torch.distributed there must not meet it.
    with session.connection.patience(DEADLINE_S):
        session.connection.barrier()
    return session


def _join_others(rank: int, world_size: int, store: Store | None) -> Session:
    shared = store if store is not None else _rendezvous()
    while True:
        try:
            session = _attempt(rank, world_size, shared)
        except Superseded:
            continue  # rank 0 has begun again, and waits for us there
        # Nobody lets go of the store, which may live in rank 0, before everybody has read from it.
        with session.connection.patience(DEADLINE_S):
            session.connection.barrier()
        return session


def _join_alone() -> Session:
    load_core()
    place = Place(0, 1, 1)
    held = Lifeline.at(0, 1)
    if held is not None and (job_id := held.ask_job(1, START_DEADLINE_S)) is not None:
        return _join_daemon(held.daemon, job_id, 0)
    service = _start_cluster(place, "")
    try:
        info = service.receive(START_DEADLINE_S)
        session = _join_daemon(info["socket"], info["job_id"], 0)
        Lifeline.hold(info["socket"], info["job_id"], 0, 1, service.keep())
        return session
    finally:
        service.close()


def _attempt(rank: int, world_size: int, store: Store) -> Session:
    """Raises Superseded if rank 0 is started again meanwhile. Whatever else goes wrong, all ranks learn of it."""
    meeting = Meeting(store, rank, world_size)
    with ExitStack() as started:
        try:
            # Before ranks and services wait for each other: a build on a busy machine outlasts their patience.
            load_core()
            place = _locate(rank, world_size, meeting)
            service = _serve(place, meeting, started)
            job_id = meeting.result()
            path = text_of(meeting.ask(f"ready/{place.node_rank}", place.first_rank(place.node_rank)), "socket")
            _check_socket(path)
            end = service.keep() if service is not None else None
            Lifeline.hold(path, job_id, place.node_rank, place.nnodes, end)
        except BaguaError as error:
            meeting.fail(str(error))
            raise
        # The attempt has ended well: errors from here on are this rank's own.
        session = _join_daemon(path, job_id, rank)
        if rank == 0 and place.nnodes > 1 and Lifeline.held is not None:
            Lifeline.held.tell_joined(job_id)
        return session


def _serve(place: Place, meeting: Meeting, started: ExitStack) -> LeashedService | None:
    """The first rank of a host does it for the others. Returns the service that was started for this world; None if the
    cluster of a former one serves it."""
    if place.local_rank:
        return None
    held = Lifeline.at(place.node_rank, place.nnodes)
    if (_lead_again if place.rank == 0 else _follow_again)(place, meeting, held):
        return None
    if place.nnodes > 1 and os.environ.get(INSECURE) == "1":
        LOG.warning(
            "%s=1: whoever reaches MASTER_ADDR:MASTER_PORT while the job starts can take part in it as a host, and see "
            "and change what it computes.",
            INSECURE,
        )
    service = (_start_node if place.rank else _start_cluster)(place, _context(place, meeting))
    started.callback(service.close)
    (_follow if place.rank else _lead)(place, meeting, service)
    return service


def _join_daemon(path: str, job_id: str, rank: int) -> Session:
    daemon = DaemonClient(path, job_id)
    return Session(daemon.join(rank), daemon)


def _rendezvous() -> Store:
    """The store of env:// rendezvous; of torch.distributed's own process group where the environment does not name
    one."""
    missing = [name for name in SOCKET_VARIABLES if not os.environ.get(name)]
    # Torch's store is there already: nobody has to listen at another port.
    if missing and distributed.is_available() and distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set for a job of several ranks. Start the script with `bagua run` or "
            "torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process. (mpirun outside of "
            "Slurm and PBS does not say where rank 0 is: `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500`.) [BG908]"
        )
    try:
        found, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=DEADLINE_S)))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ServiceError(f"The ranks could not meet at MASTER_ADDR:MASTER_PORT {address}: {error} [BG909]") from None
    store: Store = found
    return store


def _locate(rank: int, world_size: int, meeting: Meeting) -> Place:
    """Ranks per host, as rank 0 says: its LOCAL_WORLD_SIZE; where that is absent, the ranks tell it on which host they
    are. The environment of another rank alone can't be asked: it may be about a former world."""
    mine = environment.read_int("LOCAL_WORLD_SIZE", 0)
    meeting.publish(f"host/{rank}", name=_host_identity())  # rank 0 may have no LOCAL_WORLD_SIZE, and counts hosts then
    if rank == 0:
        local = mine or _count_hosts(world_size, meeting)
        if local < 1 or world_size % local:
            raise ConfigError(f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world_size}. [BG908]")
        meeting.publish("local", size=local)
        return Place(rank, world_size, local)
    told = meeting.ask("local", "Rank 0").get("size")
    # The size comes from the store, to which others may write.
    if not isinstance(told, int) or told < 1 or world_size % told or mine not in (0, told):
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={mine or ''} of rank {rank}, but rank 0 counts {told!r:.20} ranks on each host: set the "
            "same on all ranks. [BG908]"
        )
    return Place(rank, world_size, told)


def _count_hosts(world_size: int, meeting: Meeting) -> int:
    hosts = [text_of(meeting.ask(f"host/{other}", f"Rank {other}"), "name") for other in range(world_size)]
    local = hosts.count(hosts[0])
    if hosts != [host for host in dict.fromkeys(hosts) for _ in range(local)]:
        raise ConfigError(
            "Every host must have equally many ranks, numbered one after the other: set LOCAL_WORLD_SIZE. Under "
            "Slurm: srun --ntasks-per-node=N --distribution=block. [BG908]"
        )
    return local


def _host_identity() -> str:
    """Returns the same text on all processes of a host, and another one elsewhere. Containers have host names of their
    own."""
    try:
        # boot_id is the same in all containers of a machine: their host names tell them apart.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _context(place: Place, meeting: Meeting) -> str:
    """Binds the hosts' messages to this attempt: a message of another job, attempt or size proves nothing here."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {meeting.name} {place.nnodes} x {place.local_world_size}"


def _start_cluster(place: Place, context: str) -> LeashedService:
    """Starts the first host's service, whose first message says where to join."""
    require_loopback()
    command = ["bagua.daemon.ephemeral", "--nnodes", str(place.nnodes)]
    command += ["--nproc-per-node", str(place.local_world_size), f"--context={context}"]
    if place.nnodes > 1:
        command += ["--master-addr", environment.get_master_addr()]
    return LeashedService("The daemon", command)


def _start_node(place: Place, context: str) -> LeashedService:
    """Starts this host's node daemon: its first message goes to the first host, its second says where to join."""
    command = ["bagua.enroll.host", "--host", str(place.node_rank)]
    command += [f"--context={context}", "--master-addr", environment.get_master_addr()]
    return LeashedService("The node daemon", command)


def _lead_again(place: Place, meeting: Meeting, held: Lifeline | None) -> bool:
    """Rank 0: asks the cluster of a former world for a job, if all hosts have the places in it that they have now."""
    others = range(1, place.nnodes)
    job_id = None
    if held is not None:
        known = [meeting.ask(f"holds/{host}", place.first_rank(host)).get("job") for host in others]
        if all(job == held.first_job for job in known):  # one host may have been in another cluster
            job_id = held.ask_job(place.local_world_size, START_DEADLINE_S)
    meeting.publish("plan", again=job_id is not None)  # told in any case: the other hosts wait for it
    if held is None or job_id is None:
        return False
    meeting.publish("ready/0", socket=held.daemon)
    for host in others:
        meeting.ask(f"ready/{host}", place.first_rank(host))
    meeting.succeed(job_id)
    return True


def _follow_again(place: Place, meeting: Meeting, held: Lifeline | None) -> bool:
    """The first rank of another host: says in which cluster it is, and hears whether that serves this world, too."""
    host = place.node_rank
    meeting.publish(f"holds/{host}", job=held.first_job if held is not None else "")
    if held is None or meeting.ask("plan", "Rank 0").get("again") is not True:
        return False
    meeting.publish(f"ready/{host}", socket=held.daemon)
    return True


def _lead(place: Place, meeting: Meeting, service: LeashedService) -> None:
    """Rank 0: carries the messages of the other hosts to the cluster and back, and ends the attempt when all are
    there."""
    info = service.receive(START_DEADLINE_S)
    meeting.publish("ready/0", socket=info["socket"])
    for host in range(1, place.nnodes):
        hello = meeting.ask(f"hello/{host}", place.first_rank(host), service.check)
        service.send(host=host, hello=text_of(hello, "message"))
        meeting.publish(f"welcome/{host}", message=service.receive(START_DEADLINE_S)["welcome"])
    for host in range(1, place.nnodes):
        meeting.ask(f"ready/{host}", place.first_rank(host), service.check)
    meeting.succeed(info["job_id"], service.check)


def _follow(place: Place, meeting: Meeting, service: LeashedService) -> None:
    """The first rank of another host: carries its daemon's messages."""
    host = place.node_rank
    meeting.publish(f"hello/{host}", message=service.receive(START_DEADLINE_S)["hello"])
    welcome = meeting.ask(f"welcome/{host}", "Rank 0", service.check)
    service.send(welcome=text_of(welcome, "message"))
    meeting.publish(f"ready/{host}", socket=service.receive(START_DEADLINE_S)["socket"])


def _check_socket(path: str) -> None:
    """The path comes from the store: nobody but this user may have put the socket there. Raises ServiceError."""
    try:
        folder, found = os.stat(os.path.dirname(path)), os.stat(path)
    except (OSError, ValueError):
        raise ServiceError(
            f"There is no node daemon at {path!r:.200} on this host. Did it end just now? [BG914]"
        ) from None
    ours = folder.st_uid == found.st_uid == os.geteuid() and not stat.S_IMODE(folder.st_mode) & 0o077
    if not ours or not stat.S_ISSOCK(found.st_mode):
        raise ServiceError(
            f"{path!r:.200} is not the socket of a daemon of yours in a folder of yours alone: somebody else writes to "
            "the rendezvous store at MASTER_ADDR:MASTER_PORT. [BG914]"
        )
