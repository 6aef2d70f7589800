"""Assembles the coordinator, serves, and shuts it down."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import bagua
from bagua.base.address import join_address, split_address
from bagua.base.errors import ConfigError
from bagua.base.protocol import OLDEST, PROTOCOL
from bagua.base.retention import parse_keep
from bagua.base.rpc import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, STEADY_WINDOW
from bagua.base.security import check_listen_address, create_token, server_credentials
from bagua.base.system_limits import raise_descriptor_limit
from bagua.daemon.coordinator.admin.settings import Settings
from bagua.daemon.coordinator.admin.state_folder import StateFolder
from bagua.daemon.coordinator.api.accounts_servicer import AccountServicer
from bagua.daemon.coordinator.api.interceptors import CallInterceptor
from bagua.daemon.coordinator.api.jobs_servicer import JobServicer
from bagua.daemon.coordinator.api.nodes_servicer import NodeServicer
from bagua.daemon.coordinator.host import dashboard
from bagua.daemon.coordinator.host.connections import (
    TICK_S,
    Connections,
    OwnSockets,
    Refusals,
    limit_of_strangers,
)
from bagua.daemon.coordinator.host.other_coordinators import (
    DatabaseSilence,
    database_refuses,
    this_machine,
    told_address,
)
from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rounds.live_state import Board
from bagua.daemon.coordinator.rounds.publisher import Publisher
from bagua.daemon.coordinator.rounds.reconciler import Reconciler
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.domain import Change
from bagua.daemon.coordinator.rules.identity import Identity
from bagua.daemon.coordinator.rules.node_leases import NodeLeases
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.daemon.coordinator.store.store import Store
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.streams.sessions import Sessions
from bagua.daemon.coordinator.streams.watchers import STOPPING, Watchers
from bagua.daemon.coordinator.use.accounts import Accounts
from bagua.daemon.coordinator.use.audit import Audit
from bagua.daemon.coordinator.use.code_archives import CodeArchives
from bagua.daemon.coordinator.use.held_secrets import HeldSecrets
from bagua.daemon.coordinator.use.open_calls import Calls
from bagua.daemon.coordinator.use.retention import Retention
from bagua.daemon.coordinator.use.service import Service
from bagua.daemon.coordinator.use.tuning import Tuning
from bagua.otel.tracing import open_tracing
from bagua.proto import account_pb2_grpc, common_pb2, job_pb2_grpc, node_pb2

_TICK_S = 1.0
_SWITCH_S = 0.001  # threads of the database give the event loop its turn so soon
_STOP_S = 1.0  # calls get so long to end
_SERVICES = ("bagua.v1.JobService", "bagua.v1.NodeService", "bagua.v1.AccountService")
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise a port in use is shared without a word
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.server_handshake_timeout_ms", 5_000),  # a stranger who never ends a handshake goes
    # Watchers and daemons that vanished without a word are noticed, and they may ask in turn.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    *STEADY_WINDOW,
)

log = structlog.get_logger("coordinator")


class Coordinator:
    """``start``, then ``serve`` until ``stop`` was called, then ``close``. Use from one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clock = ServiceClock(min(_TICK_S, settings.lease_s / 10))
        self._stop = asyncio.Event()
        self._activity = asyncio.Event()
        self._closers = contextlib.AsyncExitStack()
        self.counters: Counter[tuple[str, str]] = Counter()
        self.sessions = Sessions(self._activity.set)
        self.watchers = Watchers()
        self.address = ""
        self.dashboard_url = ""

    async def start(self) -> None:
        """Serving when it returns. Raises ConfigError with words."""
        try:
            await self._start()
        except BaseException:
            await self._closers.aclose()
            raise

    async def _start(self) -> None:
        settings = self._settings
        host, _ = split_address(settings.listen)
        if settings.tls_files is None:
            check_listen_address(settings.listen, None)
        if settings.dashboard is not None:
            dashboard.check(settings.dashboard, settings.tls_folder)
        folder = StateFolder(settings.state_dir)
        self._closers.callback(folder.close)
        self._sockets = OwnSockets()
        self._closers.callback(self._sockets.close)
        refusals = Refusals(time.monotonic)
        self._closers.callback(refusals.log_rest)
        self._connections = Connections(
            lambda known: asyncio.to_thread(self._sockets.look, known),
            self._sockets.cut,
            limit_of_strangers(raise_descriptor_limit()),
            math.ceil(settings.stranger_s / TICK_S),
            refusals,
            self.counters,
        )
        if settings.auto_tls and settings.tls is None:
            from bagua.daemon.coordinator.admin.certs import make_certificates  # imports cryptography

            make_certificates(settings.state_dir / "tls", [settings.auto_tls])
        token = create_token(settings.token_path)
        engine = open_engine(settings.database_url or sqlite_url(folder.database))
        url = engine.url
        store = Store(engine)
        self._closers.callback(store.close)
        self._node_leases = NodeLeases(store.shared, settings.outage_s)
        name = folder.identity()
        worker = Worker(store)
        self._closers.callback(worker.close)
        sys.setswitchinterval(_SWITCH_S)
        board = Board()
        self._intake = Intake(board, self._clock)
        publisher = Publisher(board, self.sessions, self.watchers, self._intake, self.counters, self._activity.set)
        reconciler = Reconciler(
            self._intake,
            worker,
            name,
            Options(
                settings.lease_s,
                settings.settle_s,
                rejoin_s=settings.rejoin_s,
                start_s=settings.start_s,
                fence_s=settings.fence_after,
                outage_s=settings.outage_s,
            ),
            self._clock,
            board,
            self.sessions,
            publisher,
            self.counters,
            settings.job_lease_s,
            self._node_leases,
            lambda: database_refuses(url),
        )
        await self._open_tracing(publisher)
        self._service = Service(worker, board, self._intake, self._clock)
        self._tuning = Tuning(worker, self._clock)
        self._code = CodeArchives(worker, self._clock)
        self._secrets = HeldSecrets()
        self._calls = Calls()
        others = await _provider(settings) if settings.oidc_issuer else None
        self._accounts = Accounts(token, worker, self._clock, self._calls, others)
        await self._accounts.load()
        self._audit = Audit(worker, self._clock, parse_keep(settings.keep_audit, "--keep-audit"))
        self._closers.push_async_callback(self._write_audit)
        retention = Retention(worker, self._clock, parse_keep(settings.keep), publisher.forget)
        unfinished = await reconciler.start()
        self._closers.push_async_callback(reconciler.stop)
        self._spawn(reconciler.run(), "reconciler")
        self._lease = reconciler.lease
        nodes = self._service.nodes()
        self._connections.know(node.address for node in nodes)  # daemons of the time before find room at once
        await self._listen(host, store.shared, name)
        if store.shared:
            known = await asyncio.to_thread(told_address, self.address, settings.listen)
            self._lease.publish(known, this_machine())
            silence = DatabaseSilence(settings.token_path, settings.tls_folder)
            self._spawn(self._lease.ask_others(silence.ask), "silence")
        self._spawn(self._accounts.run(), "accounts")
        self._spawn(self._audit.run(), "audit")
        self._spawn(self._forget_secrets(), "secrets")
        self._spawn(self._keep_time(), "clock")
        self._spawn(retention.run(), "retention")
        self._spawn(self._code.run(), "code")
        self._spawn(self._watch_connections(), "connections")
        if settings.exit_when_idle is not None:
            self._spawn(self._exit_when_idle(settings.exit_when_idle), "idle")
        if settings.metrics_port is not None:
            self._serve_metrics(host, settings.metrics_port)
        tls = settings.tls_folder
        folder.publish(
            address=self.address, token_file=str(settings.token_path), tls="" if tls is None else str(tls.absolute())
        )
        if settings.dashboard is not None:
            await self._start_dashboard(settings.dashboard)
        log.info("serving", address=self.address, unfinished_jobs=unfinished, shared_database=store.shared)

    async def _listen(self, host: str, shared: bool, name: str) -> None:
        settings = self._settings
        interceptor = CallInterceptor(
            self._accounts.authenticate,
            self._service.owned,
            self._audit,
            self._calls,
            self._connections,
            self.counters,
            patience_s=settings.stranger_s / 2,
        )
        server = grpc.aio.server(interceptors=[interceptor], options=_OPTIONS)
        welcome = node_pb2.Welcome(
            heartbeat_s=settings.heartbeat_s,
            lease_s=settings.lease_s,
            fence_s=settings.fence_after,
            sole=not shared,
            protocol=PROTOCOL,
            oldest_protocol=OLDEST,
            version=bagua.__version__,
        )
        self._nodes = NodeServicer(
            self._intake,
            self.sessions,
            self.watchers,
            self._clock,
            welcome,
            self._tuning,
            self._code,
            self._secrets,
            self._node_leases,
            lambda: node_pb2.DatabaseSilenceReply(coordinator=name, silent_s=self._lease.silent_s),
        )
        jobs = JobServicer(self._service, self.sessions, self.watchers, self._tuning, self._code, self._secrets)
        job_pb2_grpc.add_JobServiceServicer_to_server(jobs, server)
        account_pb2_grpc.add_AccountServiceServicer_to_server(AccountServicer(self._accounts, self._audit), server)
        server.add_generic_rpc_handlers((self._nodes.handler(),))
        await _add_health_and_reflection(server)
        port = _bind(server, settings)
        await server.start()
        self._sockets.watch(port)
        self._closers.push_async_callback(server.stop, _STOP_S)
        self.address = join_address("127.0.0.1" if host in ("0.0.0.0", "::") else host, port)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)

        async def end() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        def check(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                log.critical("task_failed", task=name, exc_info=task.exception())
                self._stop.set()

        task.add_done_callback(check)
        self._closers.push_async_callback(end)

    async def submit(self, spec: common_pb2.JobSpec, job_id: str) -> None:
        """A new job of the process that holds this coordinator. Raises InvalidRequestError."""
        await self._service.submit(checked_spec(spec), "", job_id)

    async def ended(self, job_id: str) -> None:
        """Returns when the job has ended. Raises UnavailableError if the coordinator stops before."""
        with self.watchers.watch(job_id) as watcher:
            while not self._service.ended(job_id):
                await watcher.wait()

    def stop(self) -> None:
        """Asks ``serve`` to end."""
        self._stop.set()

    async def serve(self) -> None:
        """Serves until ``stop``, or until it has been idle for long enough."""
        await self._stop.wait()

    async def close(self) -> None:
        """Takes everything apart. Jobs and their ranks go on; the next coordinator on this state folder finds them."""
        log.info("stopping")
        self._nodes.stopping = True  # first: a session that ends by this is no lost node
        self.sessions.close_all(STOPPING)
        self.watchers.close()
        await self._closers.aclose()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(self._clock.tick_s)
            self._clock.tick()
            self.sessions.close_silent(self._clock.now(), self._settings.lease_s)

    async def _write_audit(self) -> None:
        """The last rows, before the database is closed."""
        try:
            await self._audit.flush()
        except Exception as error:  # the log has them; the end must go on
            log.warning("audit_not_written", error=str(error))

    async def _forget_secrets(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for job_id in self._secrets.jobs():
                if self._service.ended(job_id):
                    self._secrets.forget(job_id)

    async def _watch_connections(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._connections.tick()
            except (OSError, RuntimeError):  # of /proc, or no thread can be started; the next look may work
                log.exception("connections_not_seen")

    async def _exit_when_idle(self, patience_s: float) -> None:
        """Ends the service when no job is unfinished and no node connected, after at least one was."""
        while True:
            self._activity.clear()
            idle = self.sessions.ever_connected and not len(self.sessions)
            idle = idle and self._service.idle()
            try:
                async with asyncio.timeout(patience_s if idle else None):
                    await self._activity.wait()
            except TimeoutError:
                if self._service.idle():
                    log.info("idle", seconds=patience_s)
                    self._stop.set()
                    return

    async def _start_dashboard(self, listen: str) -> None:
        settings = self._settings
        page = dashboard.DashboardProcess(listen, self.address, settings.token_path, settings.tls_folder)
        self._closers.push_async_callback(page.stop)
        self.dashboard_url = await page.start()
        self._spawn(page.watch(), "dashboard")

    async def _open_tracing(self, publisher: Publisher) -> None:
        tracing, trouble = open_tracing("bagua-coordinator", tell=lambda text: log.warning("traces", reason=text))
        if trouble:
            log.warning("no_traces", reason=trouble)
        if tracing is None:
            return
        from bagua.daemon.coordinator.streams.spans import JobSpans

        spans = JobSpans()

        def follow(change: Change) -> None:
            try:
                for span in spans.follow(change):
                    tracing.send(span)
            except Exception:  # no job may suffer from its traces
                log.exception("not_traced", job=change.job.job_id)

        publisher.on_change = follow
        self._closers.push_async_callback(asyncio.to_thread, tracing.close)

    def _serve_metrics(self, host: str, port: int) -> None:
        from bagua.daemon.coordinator.host.metrics import (  # imports prometheus_client
            CoordinatorCollector,
            serve_metrics,
        )

        collector = CoordinatorCollector(self.counters, self.sessions, self._service, self.watchers)
        tls = None if self._settings.metrics_plain else self._settings.tls_files
        port, stop = serve_metrics(collector, host, port, tls)
        self._sockets.watch(port)
        self._closers.callback(stop)


async def _provider(settings: Settings) -> Callable[[str], Awaitable[Identity | None]]:
    """Asks an OpenID Connect provider whose a token is. Raises ConfigError."""
    from bagua.daemon.coordinator.use.oidc import Provider, parse_grants

    grants = parse_grants(settings.oidc_grants)
    if not grants:
        raise ConfigError("--oidc-issuer needs --oidc-grant: without one nobody of it may do anything. [BG809]")
    try:
        provider = Provider(
            settings.oidc_issuer, settings.oidc_audience, grants, unix_user_claim=settings.oidc_unix_user
        )
    except ModuleNotFoundError as error:
        raise ConfigError("--oidc-issuer needs PyJWT: pip install 'bagua[oidc]'. [BG209]") from error
    await provider.refresh()
    return provider.identity


def _bind(server: grpc.aio.Server, settings: Settings) -> int:
    files = settings.tls_files
    credentials = None if files is None else server_credentials(files)
    port = 0
    with contextlib.suppress(RuntimeError):  # some versions of gRPC raise, others return 0
        if credentials is None:
            port = server.add_insecure_port(settings.listen)
        else:
            port = server.add_secure_port(settings.listen, credentials)
    if port == 0:
        raise ConfigError(
            f"Can't listen on {settings.listen}: the port is in use, or the address is not one of this machine. "
            "Stop the other program, or choose another address with --listen (port 0: any free one). [BG111]"
        )
    return port


class _Health(health.aio.HealthServicer):  # type: ignore[misc,name-defined]
    async def List(self, _: Any, context: Any) -> None:
        """Refuses with words: the base class lacks it, and each call would be a traceback in the log."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Ask Check for one service. [BG811]")


async def _add_health_and_reflection(server: grpc.aio.Server) -> None:
    servicer: Any = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", *_SERVICES):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
