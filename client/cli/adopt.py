"""``bagua run --adopt``: the ephemeral cluster behind scripts that torchrun or torch.multiprocessing started.

The first rank starts this process in a session of its own. It brings up a coordinator and one node daemon, submits a
job whose ranks join by themselves, tells the rank where to join, admits the other hosts, whose messages the rank
carries, and ends with the job; or with the rank, if that ends before it has joined.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bagua.base import leash
from bagua.base.address import is_loopback, join_address
from bagua.base.errors import BaguaError, ConfigError, ServiceError

if TYPE_CHECKING:
    from bagua.cli.embedded import EmbeddedCluster
    from bagua.client import Client
    from bagua.enroll.certificates import Authority
    from bagua.proto import common_pb2, job_pb2

PLACEMENT_PATIENCE_S = 300.0
"""How long the daemons of the other hosts may take to come."""

JOIN_PATIENCE_S = 360.0
"""How long a placed job waits for its first rank. They join when all have come, and wait five minutes for the last; if
those that brought up a daemon end before, it does not wait."""


class Starter:
    """The rank that started this process. It may end before the other ranks are done, but not before it has joined."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._answer: Callable[[dict[str, Any]], dict[str, Any]] = _refuse
        self._thread = threading.Thread(target=self._listen, daemon=True, name="starter")
        self._thread.start()

    def tell(self, **message: Any) -> None:
        """Nothing if it has gone."""
        try:
            leash.send(self._socket, message)
        except OSError:
            return

    def answer_with(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """``answer`` makes the reply to each message from here on."""
        self._answer = answer

    def close(self) -> None:
        """After its last word, or ours."""
        self._socket.close()

    def _listen(self) -> None:
        joined = False
        try:
            while not joined and (message := leash.receive(self._socket)) is not None:
                joined = message == leash.JOINED
                if not joined:
                    self.tell(**self._answer(message))
        finally:
            if not joined:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def run_adopted(descriptor: int, nnodes: int, nproc_per_node: int, master_addr: str, context: str) -> int:
    """Serves one adopted job from start to end; returns the exit code. Raises BaguaError if it can't start; the rank at
    the other end of ``descriptor`` is told why. ``context`` names job and attempt, alike on all hosts."""
    _survive_terminal()
    starter = Starter(descriptor)
    try:
        return _serve(starter, nnodes, nproc_per_node, master_addr, context)
    except BaguaError as error:
        starter.tell(error=str(error))
        raise


def _serve(starter: Starter, nnodes: int, nproc_per_node: int, master_addr: str, context: str) -> int:
    from bagua.base.security import TlsFiles, read_token
    from bagua.cli.embedded import EmbeddedCluster, StateFolder, forget_other_service
    from bagua.cli.native import NativeBuild
    from bagua.client import Client
    from bagua.client.describe import exit_code

    forget_other_service()
    admission = Admission(nnodes, master_addr, context) if nnodes > 1 else None
    state = StateFolder()
    try:
        with NativeBuild() as build, EmbeddedCluster(state.path) as cluster:
            _start(cluster, nproc_per_node, admission)
            # No rank can join before the core is there, and the patience with them is shorter than a build.
            build.wait()
            token = read_token(cluster.token_file)
            tls = TlsFiles.in_folder(Path(cluster.tls)) if cluster.tls else None
            with Client(cluster.address, token=token, tls=tls) as client:
                job = client.submit(_spec(nnodes, nproc_per_node))
                if admission is not None:
                    starter.answer_with(admission.open(cluster.address, token, job.job_id))
                starter.tell(job_id=job.job_id, socket=cluster.socket)
                return exit_code(_wait(client, cluster, job))
    finally:
        state.remove()


def _survive_terminal() -> None:
    """The process that started us may end before the other ranks are done; a SIGTERM ends us in good order."""

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: the end must not be interrupted
        raise SystemExit(128 + number)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)


class Admission:
    """Admits several hosts: the job's secret, an authority for their certificates, one address to meet at."""

    def __init__(self, hosts: int, master_addr: str, context: str) -> None:
        """Raises ConfigError if the job has no secret."""
        from bagua.enroll import secret
        from bagua.enroll.certificates import Authority

        self._hosts = hosts
        self._context = context
        self._key = secret.find_key(master_addr, first=True)
        secret.forget()
        self.authority: Authority = Authority()
        self.address = own_address(master_addr)

    def write_certificates(self, folder: Path) -> Path:
        """The files of the first host's services: ``folder``, made. Raises ConfigError if it can't be."""
        from bagua.base.paths import make_private_dir, write_private
        from bagua.base.security import TlsFiles
        from bagua.enroll.certificates import key_pem, new_key

        files = TlsFiles.in_folder(make_private_dir(folder))
        key = new_key()
        write_private(files.ca, self.authority.pem(), 0o644)
        write_private(files.cert, self.authority.certify(key.public_key(), [self.address]), 0o644)
        write_private(files.key, key_pem(key))
        return folder

    def open(self, coordinator: str, token: str, job_id: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """From now on hosts may come; returns what answers them."""
        from bagua.enroll.exchange import Registrar, granter

        registrar = Registrar(
            self._key, self._context, self._hosts, granter(self.authority, coordinator, token, job_id)
        )

        def answer(message: dict[str, Any]) -> dict[str, Any]:
            try:
                return {"welcome": registrar.answer(int(message["host"]), str(message["hello"]))}
            except BaguaError as error:
                return {"error": str(error)}

        return answer


def _refuse(message: dict[str, Any]) -> dict[str, Any]:
    return {"error": f"The cluster is not ready for {' and '.join(message)}."}


def own_address(master_addr: str) -> str:
    """The address of this machine that ``master_addr`` means: the coordinator and the first host's data listen there,
    and nowhere else. Raises ConfigError if it is none of this machine's."""
    try:
        found = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR {master_addr} means nothing on the first host: {error.strerror}. [BG913]"
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in sorted(addresses, key=is_loopback):  # an /etc/hosts may name this machine's loopback, too
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return "127.0.0.1" if is_loopback(address) else address
    raise ConfigError(
        f"MASTER_ADDR {master_addr} ({', '.join(dict.fromkeys(addresses))}) is no address of the first host. Set it to "
        "one by which the other hosts reach that. [BG913]"
    )


def _start(cluster: EmbeddedCluster, nproc_per_node: int, admission: Admission | None) -> None:
    from bagua.enroll.exchange import node_id

    if admission is None:
        cluster.start_coordinator()
        cluster.start_nodes([node_id(0)], nproc_per_node)
    else:
        tls = admission.write_certificates(cluster.state / "tls")
        cluster.start_coordinator("--tls", str(tls), listen=join_address(admission.address, 0))
        cluster.start_nodes([node_id(0)], nproc_per_node, "--data-host", admission.address)


def _spec(nnodes: int, nproc_per_node: int) -> common_pb2.JobSpec:
    from bagua.proto import common_pb2

    return common_pb2.JobSpec(
        name="adopted",
        entry="(joins by itself)",
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        adopt=True,
        placement_timeout_s=PLACEMENT_PATIENCE_S,
        join_timeout_s=JOIN_PATIENCE_S,
        stop_grace_s=2.0,
    )


def _wait(client: Client, cluster: EmbeddedCluster, job: job_pb2.Job) -> job_pb2.Job:
    """The job as it ended. Raises ServiceError if a service ends before."""
    from queue import SimpleQueue

    from bagua.client.describe import ENDED

    events: SimpleQueue[job_pb2.Job | str] = SimpleQueue()

    def watch() -> None:
        try:
            for update in client.watch(job.job_id):
                if update.WhichOneof("update") == "job":
                    events.put(update.job)
            events.put("The coordinator stopped telling of the job.")
        except BaguaError as error:
            events.put(str(error))

    threading.Thread(target=watch, daemon=True, name="watch").start()
    cluster.on_unexpected_end(events.put)
    while job.state not in ENDED:
        event = events.get()
        if isinstance(event, str):
            raise ServiceError(f"{event} [BG910]")
        job = event
    return job
