"""Coordinator and node daemon of an ephemeral cluster, and the jobs that its processes ask for."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from pathlib import Path
from typing import Any

from bagua.base import parent_socket
from bagua.base.errors import ServiceError
from bagua.base.job_token import following
from bagua.base.security import read_token
from bagua.daemon.coordinator.admin.settings import make_settings
from bagua.daemon.coordinator.host.server import Coordinator
from bagua.daemon.coordinator.use.service import new_job_id
from bagua.daemon.ephemeral.admission import Admission
from bagua.daemon.ephemeral.node_process import NodeProcess
from bagua.daemon.ephemeral.users import Users, send
from bagua.daemon.log_lines import configure_logging
from bagua.proto import common_pb2

FENCE_AFTER_S = 10.0  # all of it comes and goes together: ranks need not outlive a coordinator that is away for long
PLACEMENT_PATIENCE_S = 300.0  # how long the daemons of the other hosts may take to come
# How long a placed job waits for its first rank. They join when all have come, and wait five minutes for the last; if
# the processes of the cluster end before, it does not wait.
JOIN_PATIENCE_S = 360.0


class Cluster:
    """Serves the processes that use it, from the first one to the end of the last."""

    def __init__(self, state: Path, node: NodeProcess, nnodes: int, admission: Admission | None) -> None:
        """``admission``: of the other hosts; None: there is one host."""
        configure_logging(as_json=False)
        self._node = node
        self._nnodes = nnodes
        self._admission = admission
        self._coordinator = Coordinator(
            make_settings(
                listen="127.0.0.1:0" if admission is None else admission.listen,
                state_dir=state,
                token_file=state / "token",
                database_url=f"sqlite:///{state / 'coordinator' / 'bagua.db'}",
                fence_after=0.0 if admission is None else FENCE_AFTER_S,  # one machine, which may sleep
                tls=None if admission is None else admission.tls,
            )
        )
        self._token_file = state / "token"
        self._socket = ""  # of the node daemon, for ranks
        self._first_job = ""
        self._further_jobs = 0
        self._joined: list[str] = []  # jobs of several hosts in which rank 0 is, or was

    async def serve(self, starter: socket.socket, nproc_per_node: int) -> None:
        """Raises ServiceError if it can't start, or a part of it ends."""
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        users = Users(self._answer)
        await self._coordinator.start()
        parts = (
            self._work(users, starter, nproc_per_node),
            self._until_left(users),
            stopped.wait(),
            self._watch_node(),
            self._coordinator.serve(),
        )
        ends = [asyncio.ensure_future(part) for part in parts]
        try:
            users.add(starter)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()  # raises what has ended it
        finally:
            await users.close()
            # The daemon first: the coordinator hears how the ranks ended.
            await asyncio.to_thread(self._node.stop)
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            await self._coordinator.close()

    async def _work(self, users: Users, starter: socket.socket, nproc_per_node: int) -> None:
        """Works from the first job to the end of the cluster."""
        self._socket = await asyncio.to_thread(self._node.begin, self._coordinator.address)
        job_id = await self._submit(nproc_per_node)
        users.listen(Path(self._socket).with_name(parent_socket.CLUSTER_SOCKET))
        if self._admission is not None:
            self._admission.open(self._coordinator.address, read_token(self._token_file), job_id)
        await send(starter, {"job_id": job_id, "socket": self._socket})
        gc.enable()
        await self._until_left(users)

    async def _until_left(self, users: Users) -> None:
        """Waits until no process of this host is left, nor a job that those of other hosts may be in."""
        await users.gone()
        for job_id in self._joined:
            await self._coordinator.ended(job_id)

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answers a message. Raises ServiceError, ConfigError."""
        if parent_socket.JOINED in message:
            self._joined.append(str(message[parent_socket.JOINED]))
            return {}
        if self._admission is not None and "hello" in message:
            return {"welcome": self._admission.answer(int(message["host"]), str(message["hello"]))}
        return {"job_id": await self._submit(int(message["ranks"]))}

    async def _submit(self, nproc_per_node: int) -> str:
        if self._first_job:
            self._further_jobs += 1
            job_id = following(self._first_job, self._further_jobs)
        else:
            job_id = self._first_job = new_job_id()
        spec = common_pb2.JobSpec(
            name="adopted",
            entry="(joins by itself)",
            nnodes=self._nnodes,
            nproc_per_node=nproc_per_node,
            adopt=True,
            placement_timeout_s=PLACEMENT_PATIENCE_S,
            join_timeout_s=JOIN_PATIENCE_S,
            stop_grace_s=2.0,
        )
        await self._coordinator.submit(spec, job_id)
        return job_id

    async def _watch_node(self) -> None:
        raise ServiceError(f"{await asyncio.to_thread(self._node.describe_end)} [BG910]")
