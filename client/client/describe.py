"""Jobs and nodes as JSON documents and as words. The keys are an interface: add, don't rename."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from bagua.base import islands
from bagua.proto import common_pb2, job_pb2
from bagua.timeline.shares import StepShare, step_words, straggler_words

SUCCEEDED = common_pb2.JOB_STATE_SUCCEEDED
FAILED = common_pb2.JOB_STATE_FAILED
CANCELLED = common_pb2.JOB_STATE_CANCELLED
ENDED = frozenset((SUCCEEDED, FAILED, CANCELLED))
_TIMES = ("exited_at", "last_seen")


def job_state(state: common_pb2.JobState.ValueType) -> str:
    """Turns ``JOB_STATE_RUNNING`` into ``running``."""
    return common_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()


def rank_state(state: common_pb2.RankState.ValueType) -> str:
    """Turns ``RANK_STATE_EXITED`` into ``exited``."""
    return common_pb2.RankState.Name(state).removeprefix("RANK_STATE_").lower()


def _fields(message: Any, *names: str) -> dict[str, Any]:
    """Makes a document of these fields of a message. Times that are not known are null."""
    return {name: getattr(message, name) or (None if name in _TIMES else getattr(message, name)) for name in names}


def island_size(job: job_pb2.Job) -> int:
    """Number of ranks that hold one copy of a sharded model together."""
    return islands.size_in(job.spec.env)


def rank_document(rank: common_pb2.RankStatus, island_size: int = 1) -> dict[str, Any]:
    """Makes the document of one rank. exit_code is null until the rank has exited. Ranks that are gone have a
    last_generation. Where islands have several ranks, it has its island, in its last generation.
    """
    names = ("rank", "local_rank", "node_id", "state", "pid", "exit_code", "signal", "error_tail", "reason", "log_path")
    code = rank.exit_code if rank.state == common_pb2.RANK_STATE_EXITED else None
    return {
        **_fields(rank, *names, "exited_at", "member"),
        "state": rank_state(rank.state),
        "exit_code": code,
        "last_generation": rank.last_generation or None,
        **({"island": rank.rank // island_size} if island_size > 1 else {}),
    }


def progress_document(progress: common_pb2.Progress) -> dict[str, Any]:
    """The last progress report of a job."""
    return {**_fields(progress, "rank", "step", "total", "metrics", "message"), "metrics": dict(progress.metrics)}


def job_document(job: job_pb2.Job) -> dict[str, Any]:
    """Makes the document of one job, without its events. Times are seconds since the epoch, null where it has not come
    to that. It has island_size where islands have several ranks.
    """
    size = island_size(job)
    return {
        "job_id": job.job_id,
        "name": job.spec.name,
        "state": job_state(job.state),
        "reason": job.reason,
        "nnodes": job.spec.nnodes,
        "nproc_per_node": job.spec.nproc_per_node,
        "entry": job.spec.entry,
        "args": list(job.spec.args),
        "workdir": job.spec.workdir,
        "generation": job.generation,
        "created_at": job.created_at or None,
        "started_at": job.started_at or None,
        "finished_at": job.finished_at or None,
        "waiting": job.waiting,
        "progress": progress_document(job.progress) if job.HasField("progress") else None,
        "ranks": [rank_document(rank, size) for rank in job.ranks],
        "elastic": job.spec.elastic,
        "min_nodes": (job.spec.min_nodes or 1) if job.spec.elastic else None,
        "gone": [rank_document(rank, size) for rank in job.gone],
        "joining": [{**rank_document(rank), "ready": rank.ready_to_join} for rank in job.joining],
        "wanted_nodes": job.wanted_nodes if job.spec.elastic else None,
        "paused": job.paused,
        "growth": job.growth,
        "tuning": job.tuning,
        "namespace": job.namespace,
        "submitted_by": job.submitted_by,
        "unix_user": job.unix_user,
        "step": step_lines(job),
        "step_shares": [asdict(share) for share in step_shares(job)],
        **({"island_size": size} if size > 1 else {}),
    }


def step_shares(job: job_pb2.Job) -> list[StepShare]:
    """Returns how recent steps divide, of the ranks that report it."""
    nodes = {rank.rank: rank.node_id for rank in job.ranks}
    return [
        StepShare(
            report.rank,
            nodes[report.rank],
            report.shares.compute_ms,
            report.shares.ranks_ms,
            report.shares.exposed_ms,
            report.shares.exchange,
            report.shares.exchanges,
        )
        for report in job.reports
        if report.HasField("shares") and report.rank in nodes
    ]


def step_lines(job: job_pb2.Job) -> list[str]:
    """Lines about a job that runs: what its steps wait for, and the straggler if there is one."""
    if job.state in ENDED:
        return []
    shares, size = step_shares(job), island_size(job)
    return [line for line in (step_words(shares, size), straggler_words(shares, size)) if line]


def summary_document(job: job_pb2.Job) -> dict[str, Any]:
    """Makes the document of one job of a list. It has null where lists don't tell."""
    return {**job_document(job), "args": None, "workdir": None, "waiting": None}


def event_document(event: job_pb2.JobEvent) -> dict[str, Any]:
    return _fields(event, "seq", "time", "kind", "reason", "generation")


def node_document(node: job_pb2.Node) -> dict[str, Any]:
    names = ("node_id", "hostname", "address", "slots", "used_slots", "connected", "last_seen", "version", "draining")
    return _fields(node, *names, "wire_version")


def first_failed_rank(job: job_pb2.Job) -> common_pb2.RankStatus | None:
    """The rank that the reason names if it failed, else the one that failed first; None if no rank failed by itself:
    a signal that the reason does not tell of is how the daemon stopped it."""
    exited = [r for r in job.ranks if r.state == common_pb2.RANK_STATE_EXITED]
    killed = "was killed by" in job.reason
    failed = [r for r in exited if (r.signal and killed) or (r.exit_code and not r.signal)]
    named = re.search(r"\brank (\d+)\b", job.reason)
    for rank in failed:
        if named and rank.rank == int(named.group(1)):
            return rank
    return min(failed, key=lambda rank: (rank.exited_at, rank.rank), default=None)


def exit_code(job: job_pb2.Job) -> int:
    """The exit code that tells of the end of ``job``: 0, the failed rank's (128 + N for signal N), or 1."""
    if job.state == SUCCEEDED:
        return 0
    rank = first_failed_rank(job) if job.state == FAILED else None
    if rank is None:
        return 1
    return 128 + rank.signal if rank.signal else rank.exit_code


def duration(seconds: float) -> str:
    """12.34 -> ``12.3 s``, 75 -> ``1 min 15 s``, 3700 -> ``1 h 1 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def summary(job: job_pb2.Job, seconds: float, log_folder: str = "") -> str:
    """Says in one line which job ended how, why, how long it took, and where its logs are."""
    name = job.spec.name or job.job_id
    words = {SUCCEEDED: "succeeded in", FAILED: "failed after", CANCELLED: "was cancelled after"}
    line = f"Job {name} {words.get(job.state, f'is {job_state(job.state)} after')} {duration(seconds)}"
    if job.reason and job.state != SUCCEEDED:
        line += f": {job.reason.removeprefix('cancelled: ').rstrip('.')}"
    end = "" if line.endswith("?") else "."
    return f"{line}{end} Logs: {log_folder}" if log_folder else line + end
