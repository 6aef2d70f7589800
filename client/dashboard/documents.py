"""Jobs, nodes and events as JSON documents of bounded size. Text stays as it is: the page shows it as text alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bagua.base.secrets import HIDDEN
from bagua.client.describe import duration, event_document, island_size, job_document, job_state, rank_document
from bagua.dashboard.feed import JobFeed
from bagua.proto import common_pb2, job_pb2

MAX_RANKS = 256  # of a job that are listed one by one, those that failed first
TEXT = 4_000  # characters of a reason or a traceback


def short(text: str, most: int = TEXT) -> str:
    """Cuts a text to at most so many characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def node_row(node: job_pb2.Node) -> list[Any]:
    """[id, host name, address, slots, used slots, connected, draining, last seen, version]"""
    return [
        short(node.node_id, 100),
        short(node.hostname, 100),
        short(node.address, 100),
        node.slots,
        node.used_slots,
        node.connected,
        node.draining,
        round(node.last_seen, 1),
        short(node.version, 40),
    ]


def job_row(job: job_pb2.Job) -> dict[str, Any]:
    progress = job.progress if job.HasField("progress") else None
    return {
        "id": job.job_id,
        "name": short(job.spec.name, 120),
        "entry": short(job.spec.entry, 120),
        "state": job_state(job.state),
        "reason": short(job.reason, 300),
        "nodes": job.spec.nnodes,
        "ranks": job.spec.nnodes * job.spec.nproc_per_node,
        "created": job.created_at,
        "started": job.started_at,
        "finished": job.finished_at,
        "step": progress.step if progress else None,
        "total": progress.total if progress else None,
    }


def counts(nodes: Iterable[job_pb2.Node], jobs: Iterable[job_pb2.Job]) -> dict[str, int]:
    """Figures of the cluster for the head of the page."""
    nodes = list(nodes)
    states = [job_state(job.state) for job in jobs]
    alive = [node for node in nodes if node.connected]
    return {
        "nodes": len(nodes),
        "connected": len(alive),
        "slots": sum(node.slots for node in alive),
        "used": sum(node.used_slots for node in alive),
        "running": sum(state in ("running", "starting", "stopping", "waiting") for state in states),
        "pending": states.count("pending"),
    }


def whole_job(feed: JobFeed) -> dict[str, Any]:
    """A job with its ranks. The caller holds the feed's lock."""
    job, size = feed.job, island_size(feed.job)
    shown = sorted(job.ranks, key=lambda rank: (not _failed(rank), rank.rank))[:MAX_RANKS]
    failed = next((rank for rank in shown if _failed(rank) and rank.error_tail), None)
    document = {key: value for key, value in job_document(job).items() if key not in ("ranks", "gone", "joining")}
    document["args"] = [short(text, 200) for text in job.spec.args[:50]]
    document["reason"], document["waiting"] = short(job.reason), short(job.waiting)
    document["env"] = {short(k, 100): short(v, 200) for k, v in sorted(job.spec.env.items())[:50]}
    document["ranks"] = [_rank(rank, size) for rank in sorted(shown, key=lambda rank: rank.rank)]
    document["last_lines"] = {"rank": failed.rank, "text": short(failed.error_tail)} if failed else None
    document["rank_count"] = len(job.ranks)
    document["gone"] = [_rank(rank, size) for rank in job.gone[:MAX_RANKS]]
    document["joining"] = [_rank(rank) for rank in job.joining[:MAX_RANKS]]
    document["no_again"] = no_again(job.spec)
    document["took"] = duration(job.finished_at - job.created_at) if job.finished_at else None
    return document


def _failed(rank: common_pb2.RankStatus) -> bool:
    return bool(rank.exit_code or rank.signal)


def _rank(rank: common_pb2.RankStatus, island_size: int = 1) -> dict[str, Any]:
    """Makes the document of a rank without its last lines: those of one rank are enough for the page, and those of 256
    are a megabyte.
    """
    return {name: value for name, value in rank_document(rank, island_size).items() if name != "error_tail"}


def events_of(events: Iterable[job_pb2.JobEvent]) -> list[dict[str, Any]]:
    """Makes the documents of events, in their order."""
    return [{**event_document(event), "reason": short(event.reason, 1_000)} for event in events]


def no_again(spec: common_pb2.JobSpec) -> str:
    """Says why a job can't be submitted again from here, in words; empty: it can."""
    if spec.adopt:
        return "Its ranks were started by another program (torchrun or the like): start that one again."
    hidden = sorted(name for name, value in spec.env.items() if value == HIDDEN)
    if hidden:
        return (
            f"The value of {', '.join(hidden)} looks like a secret, so the coordinator does not tell it. Submit the "
            "job with the command line, with --secret-env."
        )
    return ""
