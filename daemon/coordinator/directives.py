"""What each node of a job should be told now: a pure function of the job.

Levels, not edges: telling again changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua.daemon.coordinator.domain import JobRecord, JobState, Phase


@dataclass(frozen=True)
class Run:
    """Run this generation. ``engine_addresses`` in ring order once all are known, before that empty."""

    job_id: str
    generation: int
    host_index: int
    engine_addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stop:
    """Stop whatever of the job is there."""

    job_id: str
    generation: int
    reason: str
    grace_s: float


Directive = Run | Stop


def directives(job: JobRecord) -> dict[str, Directive]:
    """Node id -> wish, for every node that has something to do."""
    if job.state in (JobState.STARTING, JobState.RUNNING):
        known = tuple(host.engine_address for host in job.hosts)
        addresses = known if len(known) > 1 and all(known) else ()
        return {host.node_id: Run(job.job_id, job.generation, host.index, addresses) for host in job.hosts}
    if job.state is JobState.PENDING:
        return {}
    stop = Stop(job.job_id, job.generation, job.reason, job.spec.stop_grace_s)
    return {host.node_id: stop for host in job.hosts if host.phase is not Phase.STOPPED}
