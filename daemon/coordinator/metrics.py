"""Serves Prometheus metrics. Imported only when they are asked for."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bagua.base.errors import ConfigError
from bagua.base.security import TlsFiles
from bagua.daemon.coordinator.counters import Counters
from bagua.daemon.coordinator.domain import JobState
from bagua.daemon.coordinator.service import Service
from bagua.daemon.coordinator.sessions import Sessions

_COUNTERS = {  # name -> (what it counts, its label)
    "reconciles": ("Looks at a job", None),
    "decisions": ("Looks that changed a job", None),
    "reconcile_errors": ("Errors of the database", None),
    "faults": ("Steps of a job that failed by a fault of the coordinator, by step", "step"),
    "rpcs": ("Calls by method", "method"),
    "bad_calls": ("Calls that were refused, by kind", "kind"),
    "connections_cut": ("Connections that showed no token and were shut down, by reason", "reason"),
}


class CoordinatorCollector(Collector):
    """Reads the numbers when they are asked for; runs in a thread of the HTTP server."""

    def __init__(self, counters: Counters, sessions: Sessions, service: Service) -> None:
        self._counters = counters
        self._sessions = sessions
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        yield GaugeMetricFamily("bagua_coordinator_nodes_connected", "Node daemons with a session", len(self._sessions))
        jobs = GaugeMetricFamily("bagua_coordinator_jobs", "Jobs by state", labels=["state"])
        counts = self._service.count_jobs()
        for state in JobState:
            jobs.add_metric([state.name.lower()], counts.get(state, 0))
        yield jobs
        values = self._counters.values.copy()
        by_name: dict[str, dict[str, int]] = collections.defaultdict(dict)
        for (name, value), count in values.items():
            by_name[name][value] = count
        for name, (text, label) in _COUNTERS.items():
            family = CounterMetricFamily(f"bagua_coordinator_{name}", text, labels=[label] if label else [])
            for value, number in (by_name[name] or ({} if label else {"": 0})).items():
                family.add_metric([value] if label else [], number)
            yield family


@dataclass(frozen=True)
class MetricsServer:
    """Where metrics are served, and how that is ended."""

    port: int
    stop: Callable[[], None]


def serve_metrics(
    counters: Counters, sessions: Sessions, service: Service, host: str, port: int, tls: TlsFiles | None
) -> MetricsServer:
    """Serves on ``host``, with mutual TLS if the service has it. Raises ConfigError."""
    registry = CollectorRegistry()
    registry.register(CoordinatorCollector(counters, sessions, service))
    try:
        if tls is None:
            server, thread = start_http_server(port, host, registry)
        else:
            server, thread = start_http_server(
                port, host, registry, str(tls.cert), str(tls.key), client_cafile=str(tls.ca), client_auth_required=True
            )
    except OSError as error:
        raise ConfigError(
            f"Can't serve metrics on {host}:{port}: {error.strerror}. Choose another --metrics-port (0: any free one)."
        ) from error
    structlog.get_logger("coordinator").info("metrics", address=f"{host}:{server.server_port}")

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return MetricsServer(server.server_port, stop)
