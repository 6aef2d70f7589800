"""Looks at the coordinator of a job and calls it."""

from __future__ import annotations

import base64
import contextlib
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bagua.base.errors import BaguaError, NotFoundError, ServiceError
from bagua.base.paths import write_private
from bagua.base.security import TlsFiles
from bagua.client import Client, job_spec
from bagua.operator import pods
from bagua.operator.facts import Manifest, NodeState, Seen, Task
from bagua.operator.job import Spec
from bagua.operator.objects import PORT, service_name
from bagua.operator.queue import Key
from bagua.proto import common_pb2, job_pb2

CALL_S = 5.0
RECENT = 100  # Attempts are looked for among so many newest jobs
_ENDED = (common_pb2.JOB_STATE_SUCCEEDED, common_pb2.JOB_STATE_FAILED, common_pb2.JOB_STATE_CANCELLED)


def address(seen: Seen) -> str:
    """Returns the address of the job's coordinator."""
    return f"{service_name(seen)}:{PORT}"


class Connections:
    """Clients of jobs' coordinators, which last from look to look. Jobs are told apart by namespace and name; one
    thread at a time may ask for the same one. ``on_change(job)`` is called from other threads."""

    def __init__(self, on_change: Callable[[Key], object]) -> None:
        self._on_change = on_change
        self._kept: dict[Key, tuple[tuple[object, ...], Client]] = {}
        self._followed: dict[Key, tuple[str, Client]] = {}

    def client(self, job: Key, address: str, token: Manifest, tls: Manifest) -> Client:
        """Returns the client of a job, with these Secrets."""
        wanted = address, token["data"], tls["data"]
        if (kept := self._kept.get(job)) is not None and kept[0] == wanted:
            return kept[1]
        self.drop(job)
        made = connect(address, token, tls)
        self._kept[job] = wanted, made
        return made

    def kept(self, job: Key) -> Client | None:
        """Returns the client of the last look; None: it was dropped, or there was none."""
        kept = self._kept.get(job)
        return None if kept is None else kept[1]

    def follow(self, job: Key, job_id: str) -> None:
        """Tells ``on_change`` of each change at the coordinator, until the attempt ends, or the client is dropped or
        loses its connection.
        """
        wanted = job_id, self._kept[job][1]
        if self._followed.get(job) != wanted:
            self._followed[job] = wanted
            arguments = job, *wanted
            threading.Thread(target=self._follow, args=arguments, name=f"follows {job_id}", daemon=True).start()

    def _follow(self, job: Key, job_id: str, client: Client) -> None:
        last: Task | None = None
        try:
            # No waiting for a coordinator that is away: looks find it.
            for update in client.watch(job_id, patience_s=0.0):
                if update.WhichOneof("update") == "job":
                    task = task_of(update.job)
                    # Steps alone would wake the operator all the time.
                    change = last is None or replace(task, step=last.step) != last
                    if change and task.state != "stopping":  # of which the end follows at once
                        self._on_change(job)
                    last = task
        except (BaguaError, ValueError):  # it is away, or the channel is closed
            pass
        finally:
            if self._followed.get(job) == (job_id, client):
                self._followed.pop(job, None)

    def drop(self, job: Key) -> None:
        """The next look makes a new one: this one's coordinator is away, and its channel would wait ever longer."""
        self._followed.pop(job, None)
        if (kept := self._kept.pop(job, None)) is not None:
            kept[1].close()

    def close(self) -> None:
        """Drops all clients."""
        self._on_change = lambda job: None
        for job in list(self._kept):
            self.drop(job)


def connect(address: str, token: Manifest, tls: Manifest) -> Client:
    """A client of the coordinator there, with the job's Secrets. It reads their files here, and needs none later."""
    with tempfile.TemporaryDirectory(prefix="bagua-operator-") as folder:
        files = TlsFiles.in_folder(Path(folder))
        for path, key in ((files.ca, "ca.crt"), (files.cert, "tls.crt"), (files.key, "tls.key")):
            write_private(path, base64.b64decode(tls["data"][key]))
        secret = base64.b64decode(token["data"]["token"]).decode("ascii").strip()
        return Client(address, secret, files, timeout_s=CALL_S)


def look(client: Client, seen: Seen, name: str) -> Seen:
    """Adds the coordinator's answer about the attempt ``name`` and its nodes. Others are not looked for where the
    status knows its id."""
    try:
        nodes = {node.node_id: NodeState(node.connected, node.draining, node.wire_version) for node in client.nodes()}
        if job_id := seen.status.get("jobId", ""):
            with contextlib.suppress(NotFoundError):
                if (known := client.get(job_id)).spec.name == name:  # the id may be of an attempt before
                    return replace(seen, reachable=True, task=task_of(known), nodes=nodes)
        jobs = client.list(limit=RECENT)
        found = next((job for job in jobs if job.spec.name == name), None)
        others = tuple(job.job_id for job in jobs if job.spec.name != name and job.state not in _ENDED)
        task = None if found is None else task_of(client.get(found.job_id))
    except ServiceError as error:
        return replace(seen, trouble=str(error))
    return replace(seen, reachable=True, task=task, former_attempts=others, nodes=nodes)


def specification(spec: Spec, name: str) -> common_pb2.JobSpec:
    """The specification that is submitted."""
    run, elastic = spec.run, spec.elastic
    return job_spec(
        run.entry,
        args=run.args,
        module=bool(run.module),
        no_python=bool(run.program),
        name=name,
        nnodes=spec.wanted,
        nproc_per_node=spec.ranks,
        elastic=elastic is not None,
        min_nodes=spec.minimum if elastic else 0,
        max_nodes=spec.maximum if elastic else 0,
        respawn=elastic.respawn if elastic else 0,
        secret_env=dict(pods.secret_files(spec)),
        workdir=run.workdir,
        stop_grace_s=float(spec.run_policy.stop_grace_seconds),
        **run.options,
    )


def task_of(job: job_pb2.Job) -> Task:
    """The attempt, as the operator sees it."""
    ranks = [*job.ranks, *job.joining]
    # A member that is gone from its generation may still be on its way out.
    leaving = [rank for rank in job.gone if rank.state == common_pb2.RANK_STATE_RUNNING]
    return Task(
        job_id=job.job_id,
        state=common_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower(),
        reason=job.reason,
        nodes=frozenset(rank.node_id for rank in (*ranks, *leaving) if rank.node_id),
        members=frozenset(rank.node_id for rank in job.ranks if rank.node_id),
        wanted=job.wanted_nodes,
        paused=job.paused,
        step=job.progress.step,
        growth=job.growth,
        exit_code=_exit_code(job),
    )


def _exit_code(job: job_pb2.Job) -> int | None:
    """Returns the exit code of the rank that failed first; None: none has. Negative: it was killed by a signal."""
    # ``follows``: it ended because another one had failed.
    failed = [rank for rank in (*job.ranks, *job.gone) if rank.exited_at and rank.exit_code and not rank.follows]
    return min(failed, key=lambda rank: rank.exited_at).exit_code if failed else None
