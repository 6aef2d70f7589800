"""A daemon for scripts that were not started by one: torchrun, ``torch.multiprocessing.spawn``, plain ``python``.

Rank 0 starts ``bagua run --adopt`` (coordinator, node daemon, and a job whose ranks join by themselves), the first rank
of every other host starts a node daemon. What the others need to find them goes through the store of
``torch.distributed``'s env:// rendezvous: the keys are written once, read by everybody, and no gradient passes there.
Whoever can write to that store can take part in the job, as with torch.distributed itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bagua.base.address import is_loopback
from bagua.base.errors import BaguaError, ConfigError, ServiceError
from bagua.base.paths import make_private_dir
from bagua.torch_api import env
from bagua.torch_api.connection import DaemonClient
from bagua.torch_api.service_process import start_until_file, start_until_line
from bagua.torch_api.session import Session

# The first start on a machine builds the core.
START_DEADLINE_S = 240.0
RENDEZVOUS_DEADLINE = timedelta(seconds=300)
TLS_FILES = ("ca.pem", "cert.pem", "key.pem")
SOCKET_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

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


class Exchange:
    """Values that ranks tell each other through the store, each written once. Errors travel too, so that nobody waits
    in vain for a rank that failed."""

    _uses: ClassVar[list[None]] = []  # one entry per use in this process: the ranks count alike

    def __init__(self, store: Store) -> None:
        self._uses.append(None)
        self._store = PrefixStore(f"bagua/{len(self._uses)}", store)
        self._store.set_timeout(RENDEZVOUS_DEADLINE)

    def tell(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps({"value": value}))

    def fail(self, key: str, reason: str) -> None:
        self._store.set(key, json.dumps({"error": reason}))

    def ask(self, key: str, who: str) -> Any:
        """The value of ``key``, once ``who`` has told it. Raises ServiceError with the reason if that failed."""
        try:
            answer = json.loads(self._store.get(key))
        except (RuntimeError, ValueError) as error:
            raise ServiceError(
                f"{who} did not say where the daemon is ({str(error).splitlines()[0]}). Look at its output."
            ) from None
        if "error" in answer:
            raise ServiceError(f"{who} could not start a daemon: {answer['error']}")
        return answer["value"]


def join(store: Store | None) -> Session:
    """Brings up what is missing and joins. Raises ConfigError, ServiceError, CommunicationError."""
    rank, world_size = env.get_rank(), env.get_world_size()
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} and WORLD_SIZE={world_size} don't fit: ranks count from 0 to WORLD_SIZE - 1.")
    if world_size == 1:
        info = _start_all(Place(0, 1, 1))
        return _join(info["socket"], info["job_id"], 0)
    session = _join_others(rank, world_size, store)
    # Rank 0 listened at MASTER_PORT, and does so no more: who goes on to torch.distributed there must not meet it.
    session.connection.barrier(deadline_s=RENDEZVOUS_DEADLINE.total_seconds())
    return session


def _join_others(rank: int, world_size: int, store: Store | None) -> Session:
    exchange = Exchange(store if store is not None else _rendezvous())
    place = _locate(rank, world_size, exchange)
    job_id, path = _meet(place, exchange)
    session = _join(path, job_id, rank)
    # Nobody lets go of the store, which may live in rank 0, before everybody has read from it.
    session.connection.barrier(deadline_s=RENDEZVOUS_DEADLINE.total_seconds())
    return session


def _join(path: str, job_id: str, rank: int) -> Session:
    daemon = DaemonClient(path, job_id)
    return Session(daemon.join(rank), daemon)


def _rendezvous() -> Store:
    """The store of env:// rendezvous; of torch.distributed's own process group where the environment does not name
    one."""
    missing = [name for name in SOCKET_VARIABLES if not os.environ.get(name)]
    if missing and distributed.is_available() and distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set for a job of several ranks. Start the script with `bagua run` or "
            "torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process."
        )
    try:
        found, _, _ = next(rendezvous("env://", timeout=RENDEZVOUS_DEADLINE))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ServiceError(f"The ranks could not meet at MASTER_ADDR:MASTER_PORT {address}: {error}") from None
    store: Store = found
    return store


def _locate(rank: int, world_size: int, exchange: Exchange) -> Place:
    """Ranks per host: LOCAL_WORLD_SIZE; where it is absent, the ranks tell each other on which host they are."""
    local = env.read_int("LOCAL_WORLD_SIZE", 0)
    if not local:
        exchange.tell(f"host/{rank}", _host_identity())
        hosts = [exchange.ask(f"host/{other}", f"Rank {other}") for other in range(world_size)]
        local = hosts.count(hosts[0])
        if hosts != [host for host in dict.fromkeys(hosts) for _ in range(local)]:
            raise ConfigError(
                "Every host must have equally many ranks, numbered one after the other: set LOCAL_WORLD_SIZE."
            )
    if local < 1 or world_size % local:
        raise ConfigError(f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world_size}.")
    return Place(rank, world_size, local)


def _host_identity() -> str:
    """The same text on all processes of a host, another one elsewhere. Containers have host names of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _meet(place: Place, exchange: Exchange) -> tuple[str, str]:
    """(job id, path of this host's daemon socket)."""
    if place.rank == 0:
        info = _told("info", exchange, lambda: _start_all(place))
    else:
        info = exchange.ask("info", "Rank 0")
    if place.node_rank == 0:
        return info["job_id"], info["socket"]
    key = f"socket/{place.node_rank}"
    if place.local_rank == 0:
        path = _told(key, exchange, lambda: _start_node(place, info))
    else:
        path = exchange.ask(key, f"Rank {place.node_rank * place.local_world_size}")
    return info["job_id"], path


def _told(key: str, exchange: Exchange, start: Callable[[], Any]) -> Any:
    """Starts something and tells the others what came of it, be it an error."""
    try:
        value = start()
    except BaguaError as error:
        exchange.fail(key, str(error))
        raise
    exchange.tell(key, value)
    return value


def _start_all(place: Place) -> dict[str, Any]:
    """``bagua run --adopt``: what it writes to its info file, and the contents of the TLS folder where there is one."""
    command = ["bagua.cli.main", "run", "--adopt", "--nnodes", str(place.nnodes)]
    command += ["--nproc-per-node", str(place.local_world_size)]
    if place.nnodes > 1:
        command += ["--data-host", env.get_master_addr()]
    text = start_until_file("The daemon", lambda file: [*command, "--info-file", str(file)], START_DEADLINE_S)
    info: dict[str, Any] = json.loads(text)
    if place.nnodes > 1 and info.get("tls"):
        info["tls_files"] = {name: (Path(info["tls"]) / name).read_text() for name in TLS_FILES}
    return info


def _start_node(place: Place, info: Mapping[str, Any]) -> str:
    """Starts this host's node daemon; returns the path of its socket. It ends by itself after the job."""
    folder, lock = _make_state_folder()
    _write_private(folder / "token", info["token"])
    command = [
        "bagua.daemon.node",
        *("--coordinator", info["coordinator"], "--node-id", f"node-{place.node_rank:05d}"),
        *("--name", f"node-{place.node_rank:05d}", "--slots", str(place.local_world_size)),
        *("--data-host", _own_address(info["coordinator"]), "--state-dir", str(folder)),
        *("--token-file", str(folder / "token"), "--exit-when-idle", "5"),
        *_tls_arguments(folder, info),
    ]
    try:
        line = start_until_line(
            "The node daemon", lambda fd: [*command, "--ready-fd", str(fd)], [lock], START_DEADLINE_S
        )
    finally:
        os.close(lock)
    answer: dict[str, str] = json.loads(line)
    if "error" in answer:
        raise ServiceError(f"The node daemon can't start: {answer['error']}")
    return answer["socket"]


def _make_state_folder() -> tuple[Path, int]:
    """A folder for the daemon, and the descriptor of a lock on it.

    The daemon holds the lock as long as it lives; the next `bagua run` of this user removes the folder after that.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = make_private_dir(Path(base) / "bagua" if base else Path(f"/tmp/bagua-{os.getuid()}"))
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=root))
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _tls_arguments(folder: Path, info: Mapping[str, Any]) -> Sequence[str]:
    files: Mapping[str, str] = info.get("tls_files") or {}
    for name, text in files.items():
        if name not in TLS_FILES:
            raise ServiceError(f"Rank 0 sent a TLS file of unknown name {name!r}.")
        _write_private(folder / name, text)
    return ["--tls", str(folder)] if files else []


def _own_address(coordinator: str) -> str:
    """The address of this host on the way to the coordinator: other hosts reach it there."""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
