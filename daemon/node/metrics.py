"""Serves Prometheus metrics of the node daemon on loopback, and counts only when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bagua.base.errors import ConfigError
from bagua.daemon.node.job import Job

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_HELP = {
    "bytes_local": "Bytes that the engine reduced or moved between ranks of this host.",
    "bytes_sent": "Bytes sent to other hosts, headers included.",
    "bytes_received": "Bytes received from other hosts, headers included.",
    "ops": "Collective operations that ended.",
    "frames_dropped": "Frames of another generation or communicator, dropped.",
    "bad_connections": "Connections that were refused or closed for what they sent.",
    "segment_bytes": "Shared memory held for ranks.",
    "zero_copy_bytes": "Of the bytes sent, those that were to leave without a copy into the kernel.",
    "zero_copy_off": "Connections on which sending without a copy was given up.",
    "bytes_encrypted": "Of the bytes sent, those on encrypted connections.",
    "frames_refused": "Frames that were damaged or not authentic; the first of them fails its job.",
    "comm_ns": "Time spent in communication, in nanoseconds.",
}


class NodeCollector(Collector):
    """Reads jobs and their engines at the time of a scrape (in the server's thread: engines are thread-safe)."""

    def __init__(self, jobs: Callable[[], list[Job]], connected: Callable[[], bool]) -> None:
        self._jobs = jobs
        self._connected = connected

    def collect(self) -> Iterable[Metric]:
        jobs = self._jobs()
        yield GaugeMetricFamily(
            "bagua_node_connected", "1 while the coordinator's stream is up.", float(self._connected())
        )
        yield GaugeMetricFamily("bagua_node_jobs", "Jobs that run here.", len(jobs))
        yield GaugeMetricFamily("bagua_node_ranks", "Ranks that run here.", sum(len(job.state.alive) for job in jobs))
        stats = [(job.job_id, engine.stats()) for job in jobs if (engine := job.engine.native) is not None]
        for name, text in _HELP.items():
            kind = GaugeMetricFamily if name == "segment_bytes" else CounterMetricFamily
            family = kind(f"bagua_engine_{name}", text, labels=["job"])
            for job_id, values in stats:
                family.add_metric([job_id], values.get(name, 0))
            yield family


def serve_metrics(port: int, jobs: Callable[[], list[Job]], connected: Callable[[], bool]) -> WSGIServer:
    """Serves on 127.0.0.1. Raises ConfigError if the port is taken."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(jobs, connected))
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise ConfigError(
            f"Metrics can't be served on 127.0.0.1:{port}: {error.strerror}. Choose another --metrics-port."
        ) from error
    return server
