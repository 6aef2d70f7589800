"""Takes in what users want of a job that runs: pure functions. Whether and when it happens is decided elsewhere.

Each returns the job with the wish and words for its events, and raises ConflictError or InvalidRequestError with the
way out for a wish that can't be met.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bagua.base.errors import ConflictError, InvalidRequestError
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState

Wished = tuple[JobRecord, str]


def scale(job: JobRecord, nodes: int) -> Wished:
    """Asks that a job have so many nodes."""
    _check(job, "scaled")
    least, most = job.least, job.spec.most_nodes
    if not least <= nodes <= most:
        raise InvalidRequestError(
            f"nodes is {nodes}: job {job.job_id} was submitted for {least} to {most} nodes "
            "(--min-nodes and --max-nodes of bagua job submit). [BG110]"
        )
    return replace(job, wanted_nodes=nodes), f"scale to {nodes} {'node' if nodes == 1 else 'nodes'}"


def pause(job: JobRecord) -> Wished:
    """Asks that a job wait after its present step."""
    _check(job, "paused")
    return replace(job, paused=True), "pause"


def resume(job: JobRecord) -> Wished:
    """Asks that a paused job go on."""
    _check(job, "resumed")
    return replace(job, paused=False), "resume"


def cancel(job: JobRecord, reason: str) -> Wished:
    """Asks for the end of a job. One that is being stopped stays as it is."""
    if job.state is JobState.STOPPING or job.cancel_reason is not None:
        return job, ""
    return replace(job, cancel_reason=reason), reason


def last_of(node_id: str, jobs: Iterable[JobRecord]) -> None:
    """Raises ConflictError if an elastic job has nothing but this node: its state would be lost."""
    for job in jobs:
        if job.spec.elastic and job.state.under_way and [host.node_id for host in job.hosts] == [node_id]:
            raise ConflictError(
                f"Node {node_id!r} is the last one of job {job.job_id}, and holds all its state. Let another node join "
                f"first (bagua job scale {job.job_id} 2), or end the job (bagua job cancel {job.job_id}). [BG813]"
            )


def _check(job: JobRecord, done: str) -> None:
    if not job.spec.elastic:
        raise ConflictError(f"Job {job.job_id} is not elastic: it can't be {done}. Submit it with --elastic. [BG813]")
    if job.cancel_reason is not None or job.state is JobState.STOPPING:
        raise ConflictError(f"Job {job.job_id} is being stopped: it can't be {done}. [BG813]")
    if not job.state.under_way:
        raise ConflictError(
            f"Job {job.job_id} is {job.state.name.lower()}: it can be {done} once all its ranks were started. [BG813]"
        )
