"""Serves metrics of the operator to Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import bagua
from bagua.base.address import split_address
from bagua.base.errors import ConfigError
from bagua.base.metrics_server import keep_well
from bagua.operator.memory import Numbers


class OperatorCollector(Collector):
    """Reads the numbers when they are asked for. ``phases()``: of all BaguaJobs."""

    def __init__(self, numbers: Numbers, phases: Callable[[], Counter[str]]) -> None:
        self._numbers = numbers
        self._phases = phases

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily("bagua_build_info", "Version of the program; the value is 1.", labels=["version"])
        info.add_metric([bagua.__version__], 1.0)
        yield info
        jobs = GaugeMetricFamily("bagua_operator_jobs", "BaguaJobs, by their phase.", labels=["phase"])
        for phase, count in self._phases().items():
            jobs.add_metric([phase], count)
        yield jobs
        yield CounterMetricFamily("bagua_operator_looks", "Looks at BaguaJobs.", value=self._numbers.looks)
        text = "Looks that failed by a mistake of the operator, and are tried again."
        yield CounterMetricFamily("bagua_operator_faults", text, value=self._numbers.faults)
        text = "Refusals of the Kubernetes API, by its code or reason; none: it did not answer."
        refusals = CounterMetricFamily("bagua_operator_refusals", text, labels=["reason"])
        for reason, count in self._numbers.refusals.copy().items():
            refusals.add_metric([reason], count)
        yield refusals


def serve_metrics(address: str, collector: OperatorCollector) -> Callable[[], None]:
    """Serves metrics at HOST:PORT; returns what ends it. Raises ConfigError."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    prometheus_client.ProcessCollector(registry=registry)
    host, port = split_address(address)
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"Can't serve metrics on {address}: {error.strerror}. Give --metrics another. [BG111]"
        ) from error
    keep_well(server)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
