"""A rank's report, out of the coordinator's messages."""

from __future__ import annotations

from collections.abc import Mapping

from bagua.dashboard.history import Report, Shares
from bagua.proto import common_pb2, job_pb2

# Figures of the newest step, among the metrics of each report of a rank that trains.
EXPOSED, HIDDEN, COMPUTE = "comm exposed ms", "comm hidden ms", "compute ms"
_FIGURES = frozenset((EXPOSED, HIDDEN, COMPUTE))


def report_of(progress: common_pb2.Progress, time: float, nodes: Mapping[int, str]) -> Report:
    """``time`` in seconds since the epoch; ``nodes``: the node of each rank."""
    metrics = dict(progress.metrics)
    told = progress.HasField("bytes")
    return Report(
        time=time,
        rank=progress.rank,
        node=nodes.get(progress.rank, ""),
        step=progress.step,
        total=progress.total,
        metrics={name: value for name, value in sorted(metrics.items()) if name not in _FIGURES},
        own=not progress.by_itself,
        message=progress.message,
        shares=shares_of(progress, metrics),
        bytes_inside=progress.bytes.inside if told else None,
        bytes_between=progress.bytes.between if told else None,
    )


def shares_of(progress: common_pb2.Progress, metrics: Mapping[str, float]) -> Shares | None:
    """Returns how a step divides; None if the rank does not train by backward passes. Averages of recent steps where
    the report has them, else those of the newest step, where waits for ranks of the host count as computation.
    """
    if progress.HasField("shares"):
        found = progress.shares
        return Shares(found.compute_ms, found.ranks_ms, found.exposed_ms, found.hidden_ms)
    if COMPUTE not in metrics:
        return None
    return Shares(metrics[COMPUTE], 0.0, metrics.get(EXPOSED, 0.0), metrics.get(HIDDEN, 0.0))


def last_reports(job: job_pb2.Job) -> list[common_pb2.Progress]:
    """The newest report of each rank as far as the coordinator tells, at least that of one."""
    return list(job.reports) or ([job.progress] if job.HasField("progress") else [])
