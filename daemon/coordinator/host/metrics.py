"""Serves Prometheus metrics. Imported only when they are asked for."""

from __future__ import annotations

import collections
import contextlib
import itertools
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bagua.base.errors import ConfigError, ServiceError
from bagua.base.metrics_server import keep_well
from bagua.base.security import TlsFiles, follow_files
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState
from bagua.daemon.coordinator.streams.sessions import Sessions
from bagua.daemon.coordinator.streams.watchers import Watchers
from bagua.daemon.coordinator.use.service import Service
from bagua.daemon.metric_families import BUILD_INFO, Family, build_info

COUNT_S = 2.0  # a database that takes longer is left out: Prometheus gives a whole scrape 10 s
MOST_JOBS = 1_000  # living jobs that have metrics of their own: a scrape stays small

_CONNECTED = Family("bagua_coordinator_nodes_connected", "Node daemons that have a session with this coordinator.")
_DRAINING = Family("bagua_coordinator_nodes_draining", "Connected nodes on which nothing new begins.")
_SLOTS = Family("bagua_coordinator_slots", "Slots of connected nodes: ranks that could run at once.")
_USED = Family("bagua_coordinator_slots_used", "Slots of connected nodes that jobs hold.")
_JOBS = Family("bagua_coordinator_jobs", "Jobs in the database, by state; absent while it does not answer.", ("state",))
_OLDEST = Family("bagua_coordinator_oldest_pending_seconds", "Age of the oldest job that waits for its first nodes.")
_COUNTED = {
    "reconciles": Family("bagua_coordinator_reconciles_total", "Looks at jobs that wait for nodes."),
    "decisions": Family("bagua_coordinator_decisions_total", "Looks that changed a job."),
    "events": Family("bagua_coordinator_events_total", "Events that were added to histories of jobs.", ("kind",)),
    "ended": Family("bagua_coordinator_jobs_ended_total", "Jobs that came to their end.", ("state",)),
    "transactions": Family("bagua_coordinator_transactions_total", "Transactions that were written."),
    "transaction_ns": Family(
        "bagua_coordinator_transaction_seconds_total", "Time that these took, the wait for the disk included."
    ),
    "reconcile_errors": Family("bagua_coordinator_reconcile_errors_total", "Rounds that failed, and are tried again."),
    "faults": Family(
        "bagua_coordinator_faults_total", "Steps of jobs that failed by a coordinator's fault.", ("step",)
    ),
    "rpcs": Family("bagua_coordinator_rpcs_total", "Calls that were answered.", ("method",)),
    "bad_calls": Family("bagua_coordinator_bad_calls_total", "Calls that were refused.", ("kind",)),
    "connections_cut": Family(
        "bagua_coordinator_connections_cut_total", "Connections that showed no token and were shut down.", ("reason",)
    ),
}
# Shown before they were ever counted: Prometheus sees no increase in a series that begins with 1.
_FROM_ZERO = (
    *(("ended", state.name.lower()) for state in JobState if state.terminal),
    *(("events", kind) for kind in ("regrouped", "suspended", "newcomers_lost")),
    *(("faults", step) for step in ("observe", "forget", "decide", "write")),
    ("bad_calls", "unauthenticated"),
)
_INFO = Family("bagua_job_info", "A living job; the value is 1.", ("job_id", "name", "state"))
_NODES = Family("bagua_job_nodes", "Nodes of a job.", ("job_id",))
_WANTED = Family("bagua_job_nodes_wanted", "Nodes that a job would take.", ("job_id",))
_RANKS = Family("bagua_job_ranks", "Ranks of a job's generation.", ("job_id",))
_ISLANDS = Family(
    "bagua_job_islands", "Islands of a job's generation, of jobs whose islands have several ranks.", ("job_id",)
)
_JOINING = Family("bagua_job_newcomers", "Ranks that prepare to join.", ("job_id",))
_GENERATION = Family("bagua_job_generation", "Number of a job's generation: goes up with each change.", ("job_id",))
_CREATED = Family("bagua_job_created_timestamp_seconds", "When a job was submitted, since the epoch.", ("job_id",))
_STEP = Family("bagua_job_step", "Newest step that a rank of the job reported.", ("job_id",))
_PARTS = Family(
    "bagua_job_step_seconds",
    "Mean time of a recent step of the rank that reported last, by part: compute, ranks (waits for ranks of its host), "
    "exposed (waits for an exchange), hidden (an exchange beside compute).",
    ("job_id", "part"),
)

# Metrics that the coordinator has of its own; ``process_...`` come from the library.
FAMILIES = (
    *(BUILD_INFO, _CONNECTED, _DRAINING, _SLOTS, _USED, _JOBS, _OLDEST, *_COUNTED.values()),
    *(_INFO, _NODES, _WANTED, _RANKS, _ISLANDS, _JOINING, _GENERATION, _CREATED, _STEP, _PARTS),
)


class JobCounts:
    """Asks the database in a thread of its own: one that does not answer must not keep the other numbers away."""

    def __init__(self, read: Callable[[], Mapping[JobState, int]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._found: Mapping[JobState, int] | None = None

    def get(self) -> Mapping[JobState, int] | None:
        """Jobs by state; None: no answer within ``COUNT_S``."""
        with self._lock:
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(target=self._ask, name="job-counts", daemon=True)
                self._asking.start()
            asking = self._asking
        asking.join(COUNT_S)
        return None if asking.is_alive() else self._found

    def _ask(self) -> None:
        self._found = None
        with contextlib.suppress(ServiceError):  # of which the log and other metrics tell
            self._found = self._read()


class CoordinatorCollector(Collector):
    """Reads the numbers when they are asked for; runs in a thread of the HTTP server."""

    def __init__(
        self, counters: Counter[tuple[str, str]], sessions: Sessions, service: Service, watchers: Watchers
    ) -> None:
        self._counters = counters
        self._sessions = sessions
        self._service = service
        self._counts_of_jobs = JobCounts(service.count_jobs)
        self._watchers = watchers

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: a registry need not ask the database when it starts."""
        return ()

    def collect(self) -> Iterable[Metric]:
        yield build_info()
        living = self._service.living()
        yield from self._cluster(living)
        yield from self._counts()
        yield from self._of_jobs(living[:MOST_JOBS])

    def _cluster(self, living: list[JobRecord]) -> Iterator[Metric]:
        nodes = [node for node in self._service.nodes() if node.connected]
        yield _CONNECTED.single(len(self._sessions))
        yield _DRAINING.single(sum(node.draining for node in nodes))
        yield _SLOTS.single(sum(node.slots for node in nodes))
        yield _USED.single(sum(node.used for node in nodes))
        counts = self._counts_of_jobs.get()
        states = JobState if counts is not None else ()
        yield _JOBS.of({(state.name.lower(),): (counts or {}).get(state, 0) for state in states})
        oldest = min((job.created_at for job in living if job.state is JobState.PENDING), default=None)
        yield _OLDEST.single(0.0 if oldest is None else max(0.0, time.time() - oldest))

    def _counts(self) -> Iterator[Metric]:
        by_name: dict[str, dict[tuple[str, ...], float]] = collections.defaultdict(dict)
        values = dict.fromkeys(_FROM_ZERO, 0) | self._counters.copy()  # a copy: the event loop counts on
        for (name, value), count in values.items():
            unit = 1e-9 if name.endswith("_ns") else 1
            by_name[name][(value,) if _COUNTED[name].labels else ()] = count * unit
        for name, family in _COUNTED.items():
            yield family.of(by_name[name] or ({} if family.labels else {(): 0.0}))

    def _of_jobs(self, jobs: list[JobRecord]) -> Iterator[Metric]:
        yield _INFO.of({(job.job_id, job.spec.name, job.state.name.lower()): 1.0 for job in jobs})
        for family, number in (
            (_NODES, lambda job: len(job.hosts)),
            (_WANTED, lambda job: job.wanted),
            (_RANKS, lambda job: len(job.ranks)),
            (_JOINING, lambda job: sum(part.nranks for part in job.joining)),
            (_GENERATION, lambda job: job.generation),
            (_CREATED, lambda job: job.created_at),
        ):
            yield family.of({(job.job_id,): number(job) for job in jobs})
        sharded = (job for job in jobs if job.spec.island_size > 1)
        yield _ISLANDS.of({(job.job_id,): len(job.ranks) // job.spec.island_size for job in sharded})
        told = {job.job_id: progress for job in jobs if (progress := self._watchers.progress(job.job_id)) is not None}
        yield _STEP.of({(job_id,): progress.step for job_id, progress in told.items()})
        measured = {job_id: progress.shares for job_id, progress in told.items() if progress.HasField("shares")}
        parts = ("compute", "ranks", "exposed", "hidden")
        yield _PARTS.of(
            {
                (job_id, part): getattr(measured[job_id], f"{part}_ms") / 1e3
                for job_id, part in itertools.product(measured, parts)
            }
        )


def serve_metrics(
    collector: CoordinatorCollector, host: str, port: int, tls: TlsFiles | None
) -> tuple[int, Callable[[], None]]:
    """Serves on ``host``, with mutual TLS by ``tls``. Returns the port, and what ends it. Raises
    ConfigError."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        if tls is None:
            server, thread = start_http_server(port, host, registry)
        else:
            server, thread = start_http_server(
                port, host, registry, str(tls.cert), str(tls.key), client_cafile=str(tls.ca), client_auth_required=True
            )
            assert isinstance(server.socket, ssl.SSLSocket)
            follow_files(server.socket.context, tls)
    except OSError as error:
        raise ConfigError(
            f"Can't serve metrics on {host}:{port}: {error.strerror}. Choose another --metrics-port (0: any free one). "
            "[BG111]"
        ) from error
    keep_well(server)
    structlog.get_logger("coordinator").info("metrics", address=f"{host}:{server.server_port}")

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
