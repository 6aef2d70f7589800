"""``bagua run --adopt``: the ephemeral daemon behind scripts that torchrun or torch.multiprocessing started.

The first rank starts this process in a session of its own. It brings up a coordinator and one node daemon, submits a
job whose ranks join by themselves, tells the ranks through the info file where to join, and ends with the job.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from bagua.base.address import is_loopback, join_address

if TYPE_CHECKING:
    from bagua.cli.embedded import EmbeddedCluster
    from bagua.client import Client
    from bagua.proto import common_pb2, job_pb2

NODE_ID = "node-00000"
PLACEMENT_PATIENCE_S = 300.0
"""How long the daemons of the other hosts may take to come."""

JOIN_PATIENCE_S = 60.0
"""How long a placed job waits for its first rank."""


def run_adopted(info_file: Path, nnodes: int, nproc_per_node: int, data_host: str) -> int:
    """Serves one adopted job from start to end; returns the exit code. Raises BaguaError if it can't start."""
    from bagua.base.security import TlsFiles, read_token
    from bagua.cli.describe import exit_code
    from bagua.cli.embedded import EmbeddedCluster, StateFolder, forget_other_service
    from bagua.cli.native import CoreBuild
    from bagua.client import Client

    _survive_terminal()
    forget_other_service()
    state = StateFolder()
    try:
        with CoreBuild() as build, EmbeddedCluster(state.path) as cluster:
            _start(cluster, nnodes, nproc_per_node, data_host)
            # No rank can join before the core is there, and the patience with them is shorter than a build.
            build.wait()
            token = read_token(cluster.token_file)
            tls = TlsFiles.in_folder(Path(cluster.tls)) if cluster.tls else None
            with Client(cluster.address, token=token, tls=tls) as client:
                job = client.submit(_spec(nnodes, nproc_per_node))
                _write_info(info_file, cluster, token, job.job_id)
                return exit_code(_wait(client, cluster, job))
    finally:
        state.remove()


def _survive_terminal() -> None:
    """The process that started us may die before the other ranks are done; a SIGTERM ends us in good order."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)


def _start(cluster: EmbeddedCluster, nnodes: int, nproc_per_node: int, data_host: str) -> None:
    if nnodes > 1 and not is_loopback(data_host):
        cluster.start_coordinator("--auto-tls", data_host, listen=join_address(data_host, 0))
    else:
        cluster.start_coordinator()
    cluster.start_nodes([NODE_ID], nproc_per_node, "--data-host", data_host)


def _spec(nnodes: int, nproc_per_node: int) -> common_pb2.JobSpec:
    from bagua.proto import common_pb2

    return common_pb2.JobSpec(
        name="adopted",
        entry="(joins by itself)",
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        adopt=True,
        placement_timeout_s=PLACEMENT_PATIENCE_S,
        stop_grace_s=2.0,
    )


def _write_info(path: Path, cluster: EmbeddedCluster, token: str, job_id: str) -> None:
    """Writes what ranks and daemons of other hosts need, readable by this user alone, all or nothing."""
    document = {
        "coordinator": cluster.address,
        "token": token,
        "tls": cluster.tls,
        "job_id": job_id,
        "socket": cluster.socket,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(document, file)
    temporary.rename(path)


def _wait(client: Client, cluster: EmbeddedCluster, job: job_pb2.Job) -> job_pb2.Job:
    """Waits for the job's end; cancels it when no rank joins for a minute after it was placed."""
    from queue import Empty, SimpleQueue
    from threading import Thread

    from bagua.base.errors import BaguaError, ServiceError
    from bagua.cli.describe import ENDED
    from bagua.proto import common_pb2

    events: SimpleQueue[job_pb2.Job | str] = SimpleQueue()

    def watch() -> None:
        try:
            for update in client.watch(job.job_id):
                if update.WhichOneof("update") == "job":
                    events.put(update.job)
            events.put("The coordinator stopped telling of the job.")
        except BaguaError as error:
            events.put(str(error))

    Thread(target=watch, daemon=True, name="watch").start()
    cluster.on_unexpected_end(events.put)
    deadline = float("inf")
    while job.state not in ENDED:
        try:
            event = events.get(timeout=min(3600.0, max(0.0, deadline - time.monotonic())))
        except Empty:
            if time.monotonic() >= deadline:
                return client.cancel(job.job_id, reason=f"no rank joined within {JOIN_PATIENCE_S:.0f} s")
            continue
        if isinstance(event, str):
            raise ServiceError(event)
        job = event
        if any(rank.state != common_pb2.RANK_STATE_WAITING for rank in job.ranks):
            deadline = float("inf")
        elif job.ranks and deadline == float("inf"):
            deadline = time.monotonic() + JOIN_PATIENCE_S
    return job
