"""Serves Prometheus metrics of the node daemon on loopback, and counts only when somebody asks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bagua.base.errors import ConfigError
from bagua.base.metrics_server import keep_well
from bagua.daemon.metric_families import BUILD_INFO, Family, build_info
from bagua.daemon.node.jobs.job import Job

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_CONNECTED = Family("bagua_node_connected", "1 while the coordinator's stream is up.")
_JOBS = Family("bagua_node_jobs", "Jobs that run here.")
_RANKS = Family("bagua_node_ranks", "Ranks that run here.")
_SLOTS = Family("bagua_node_slots", "Ranks that may run here at once.")
_LIVES = Family(
    "bagua_node_daemon_lives", "Daemon processes that the keeper has started: one more after a crash, or a reload."
)
_KILLS = Family("bagua_node_daemon_kills_total", "Daemon processes that were killed, and started again by the keeper.")
_REFUSED = Family(
    "bagua_node_refused_frames_total",
    "Frames that were damaged or not authentic, of all jobs here, those that have ended included.",
)
_FREE = Family(
    "bagua_node_state_free_bytes",
    "Room on the disk of the state folder, or on that of the logs of ranks, where that has less.",
)
_SUSPENDED = Family("bagua_node_job_suspended", "1 while a job here waits for its next generation.", ("job_id",))


def _engine(name: str, text: str) -> Family:
    return Family(f"bagua_engine_{name}", text, ("job_id",))


_ENGINE = {  # what the engine calls it -> the metric
    "bytes_local": _engine("local_bytes_total", "Bytes that the engine reduced or moved between ranks of this host."),
    "bytes_sent": _engine("sent_bytes_total", "Bytes sent to other hosts, headers included."),
    "bytes_received": _engine("received_bytes_total", "Bytes received from other hosts, headers included."),
    "ops": _engine("operations_total", "Collective operations that ended."),
    "frames_dropped": _engine("dropped_frames_total", "Frames of another generation or communicator, dropped."),
    "bad_connections": _engine("refused_connections_total", "Connections refused or closed for what they sent."),
    "segment_bytes": _engine("segment_bytes", "Shared memory held for ranks."),
    "bytes_encrypted": _engine("encrypted_bytes_total", "Of the bytes sent, those on encrypted connections."),
    "frames_refused": _engine("refused_frames_total", "Frames that were damaged or not authentic."),
    "comm_ns": _engine("communication_seconds_total", "Time during which at least one operation ran."),
}
# Metrics that a daemon has of its own; ``process_...`` come from the library.
FAMILIES = (
    BUILD_INFO,
    _CONNECTED,
    _JOBS,
    _RANKS,
    _SLOTS,
    _LIVES,
    _KILLS,
    _REFUSED,
    _FREE,
    _SUSPENDED,
    *_ENGINE.values(),
)


@dataclass(frozen=True)
class NodeCollector(Collector):
    """Reads jobs and their engines at the time of a scrape (in the server's thread: engines are thread-safe)."""

    jobs: Callable[[], list[Job]]
    connected: Callable[[], bool]
    slots: int
    life: int
    kills: int
    refused_frames: Callable[[], int]
    folders: tuple[Path, ...]

    def collect(self) -> Iterable[Metric]:
        jobs = self.jobs()
        yield build_info()
        yield _CONNECTED.single(float(self.connected()))
        yield _JOBS.single(len(jobs))
        yield _RANKS.single(sum(len(job.state.alive) for job in jobs))
        yield _SLOTS.single(self.slots)
        yield _LIVES.single(self.life)
        yield _KILLS.single(self.kills)
        yield _REFUSED.single(self.refused_frames())
        yield _FREE.of(room(self.folders))
        yield _SUSPENDED.of({(job.job_id,): float(bool(job.state.suspended)) for job in jobs})
        yield from _of_engines(jobs)


def room(folders: Iterable[Path]) -> dict[tuple[str, ...], float]:
    """The least of their disks; nothing if one can't be asked."""
    try:
        return {(): min(shutil.disk_usage(folder).free for folder in folders)}
    except OSError:
        return {}


def _of_engines(jobs: list[Job]) -> Iterator[Metric]:
    stats = [(job.job_id, engine.stats()) for job in jobs if (engine := job.engine.native) is not None]
    for name, family in _ENGINE.items():
        unit = 1e-9 if name == "comm_ns" else 1
        yield family.of({(job_id,): values.get(name, 0) * unit for job_id, values in stats})


def serve_metrics(port: int, collector: NodeCollector) -> WSGIServer:
    """Serves on 127.0.0.1. Raises ConfigError if the port is taken."""
    registry = CollectorRegistry(auto_describe=False)  # True would count once here, before anybody asks
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError(
            f"Metrics can't be served on 127.0.0.1:{port}: {error.strerror}. Choose another --metrics-port. [BG111]"
        ) from error
    keep_well(server)
    return server
