"""Assembles the node daemon: folder, sockets, session and jobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bagua
from bagua.base.address import is_loopback
from bagua.base.control_group import own_group
from bagua.base.errors import ConfigError
from bagua.base.parent_socket import CLUSTER_SOCKET
from bagua.base.paths import cache_dir
from bagua.base.protocol import OLDEST, PROTOCOL
from bagua.base.trace_context import EVERY_STEPS, STEPS_VARIABLE
from bagua.base.trees import remove_tree
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.daemon.ephemeral.users import Users
from bagua.daemon.node.host.settings import NodeFolder, Settings, open_node_folder
from bagua.daemon.node.jobs import rank_service
from bagua.daemon.node.jobs.code import CodeCache
from bagua.daemon.node.jobs.context import NodeContext
from bagua.daemon.node.jobs.engine_host import CoreHost, RefusedFrames
from bagua.daemon.node.jobs.job import Job
from bagua.daemon.node.jobs.jobs import Jobs
from bagua.daemon.node.jobs.journal import Journal
from bagua.daemon.node.jobs.trace_service import TraceService
from bagua.daemon.node.keeper.link import KeeperLink, connections_to
from bagua.daemon.node.logs.echo import Echo
from bagua.daemon.node.logs.file import LogFile, LogLimits
from bagua.daemon.node.logs.service import LogService
from bagua.daemon.node.processes.groups import JobGroups
from bagua.daemon.node.processes.process import end_children
from bagua.daemon.node.ranks.environment import passed_on
from bagua.daemon.node.ranks.places import OwnPlaces, open_user_places
from bagua.daemon.node.ranks.runtime_dir import leave_socket_folder, socket_folder
from bagua.daemon.node.rules.job_specification import unpack
from bagua.daemon.node.session.fence import Fence
from bagua.daemon.node.session.session import Endpoint, Session
from bagua.otel.tracing import open_tracing
from bagua.proto import node_pb2

if TYPE_CHECKING:
    import grpc.aio
    from structlog.typing import FilteringBoundLogger

STOP_GRACE_S = 2.0
STOP_JOBS_S = 3.5
WIND_DOWN_S = 4.4
# Grace of ranks, time for all of a job, the same with the last reports, and time for the compiler: together below the
# five seconds of a daemon's end.
KILL_CHILDREN_S = 0.5
ECHO_S = 0.5

Ready = Callable[[dict[str, str]], object]
FIRST_JOB_S = 360.0  # ranks wait five minutes for those of the last host, whose daemon the job needs to be placed


class IdleWatch:
    """Calls ``on_idle`` when the daemon has had nothing to do for ``idle_s`` seconds after a job, or never any for six
    minutes more. Without ``idle_s`` it never does."""

    def __init__(self, idle_s: float | None, on_idle: Callable[[], None]) -> None:
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        if idle_s is not None:
            self._timer = self._loop.call_later(idle_s + FIRST_JOB_S, on_idle)

    def update(self, busy: bool) -> None:
        """Call when it may have changed."""
        if self._idle_s is None or busy is self._busy:
            return
        self._busy = busy
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if busy else self._loop.call_later(self._idle_s, self._on_idle)


class NodeDaemon:
    """Daemon of one node. It is made with the event loop running, in the main thread."""

    def __init__(self, settings: Settings, folder: NodeFolder, keeper: KeeperLink, log: FilteringBoundLogger) -> None:
        """Makes the parts of the daemon. Raises ConfigError."""
        self._settings = settings
        self._folder = folder
        self._log = log
        self._keeper = keeper
        self._streams = keeper.life << 32  # grows from life to life
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._draining = False
        self._exit_code = 0
        self._echo = Echo() if settings.echo else None
        self._used = False  # by processes of this host, in an ephemeral cluster
        self._upgrade = 0  # number of the request that the keeper looks at
        keeper.on_refusal = self._not_upgraded
        keeper.on_loss = lambda words: self._log.warning("the keeper could not take something", why=words)
        environment = passed_on(os.environ, settings.pass_env)
        self._tracing, trouble = open_tracing(
            "bagua-daemon", folder.node_id, lambda text: log.warning("traces", reason=text)
        )
        if trouble:
            log.warning("no traces", reason=trouble)
        if self._tracing is not None:
            every = os.environ.get(STEPS_VARIABLE, str(EVERY_STEPS))
            environment = {**environment, STEPS_VARIABLE: every}
        self._kept_variables = sorted(os.environ.keys() - environment.keys())
        self._sockets = socket_folder(folder.path)
        own = OwnPlaces(self._sockets, folder.jobs)
        self._rank_socket = own.rank_socket
        run_as = settings.run_as
        self._core = CoreHost()
        self._refused_frames = RefusedFrames()
        self._fence = Fence(keeper, self._patience, self._end_ranks, lambda *fence: self._jobs.set_fence(*fence), log)
        node = NodeContext(
            node_id=folder.node_id,
            data_host=settings.data_host,
            wire=settings.wire,
            jobs_folder=folder.jobs,
            logs_folder=folder.logs,
            places=own if run_as is None else open_user_places(run_as.folder, folder.path),
            groups=JobGroups(folder.path, own_group()),
            serve_ranks=self._serve_job,
            run_as=run_as,
            cache=cache_dir(),
            journal=Journal(folder.journal),
            ask_secrets=lambda job: self._session.questions.ask_secrets(job),
            code=CodeCache(folder.code, lambda job, piece: self._session.questions.ask_code(job, piece)),
            core=self._core,
            refused_frames=self._refused_frames,
            keeper=keeper,
            lease_over=self._fence.over,
            log=log,
            log_limits=LogLimits(settings.log_max_bytes, settings.log_files),
            environment=environment,
            keep=settings.keep_logs,
            echo=self._echo,
            send_span=self._tracing.send if self._tracing is not None else None,
        )
        self._jobs = Jobs(node, self._job_changed)
        self._session = Session(
            Endpoint(settings.coordinator, settings.token_file, settings.tls),
            hello=self._hello,
            snapshot=self._jobs.snapshot,
            status=self._status,
            on_directive=self._directive,
            on_connection=self._connection_changed,
            lease=self._fence.lease,
            log=log,
        )
        self._logs = LogService(self._find_log, self._session.reply)
        self._traces = TraceService(folder.node_id, self._jobs, self._session.reply)
        self._idle = IdleWatch(settings.exit_when_idle_s, lambda: self.stop("idle"))

    def stop(self, reason: str) -> None:
        """Asks for the end. Idempotent; the first reason counts."""
        self._stop_reason = self._stop_reason or reason
        self._stop.set()

    def drain(self, reason: str) -> None:
        """Asks for the end as soon as no job runs here any more, or the time for that is over: the coordinator lets
        elastic jobs leave. The second time, or without ``drain_grace_s``: at once."""
        grace_s = self._settings.drain_grace_s
        if self._draining or not grace_s or not self._jobs.running():
            self.stop(reason)
            return
        self._draining = True
        self._log.info("the node is being drained", reason=reason, seconds=grace_s)
        self._session.report_status()
        words = f"{reason}; jobs had not left it within --drain-grace {grace_s:g}"
        asyncio.get_running_loop().call_later(grace_s, self.stop, words)

    async def run(self, ready: Ready) -> int:
        """Runs until stopped; the exit code. ``ready`` is called after the first Welcome. Raises ConfigError for what
        can't work at the start.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, self.stop, "SIGINT")
        async with contextlib.AsyncExitStack() as closing:
            # Called last, as the first one here: nothing starts a child any more.
            closing.push_async_callback(end_children, KILL_CHILDREN_S)
            if self._echo is not None:
                closing.push_async_callback(asyncio.to_thread, self._echo.close, ECHO_S)
            closing.callback(leave_socket_folder, self._sockets, self._folder.path)
            if self._settings.leash is not None:
                await self._serve_users(closing, self._settings.leash)
            if self._tracing is not None:
                closing.push_async_callback(asyncio.to_thread, self._tracing.close)
            self._tell_encryption()
            if self._settings.run_as is not None:
                self._log.info("ranks run as the Unix user of their submitter")
            await self._jobs.recover()
            self._serve_metrics(closing)
            await self._serve_ranks(closing)
            works = (self._fence.run(), self._jobs.expire(), self._session.run())
            for task in (tasks := [asyncio.ensure_future(work) for work in works]):
                closing.push_async_callback(_end_task, task)
            await self._until_stopped(tasks, ready)
            await self._wind_down()
        return self._exit_code

    async def _serve_users(self, closing: contextlib.AsyncExitStack, first: int) -> None:
        """This daemon is that of a host of an ephemeral cluster. That of the first host stays as long as the process
        that started it, that of another one as long as processes that use it."""
        users = Users(_refuse_question)
        closing.push_async_callback(users.close)
        users.add(socket.socket(fileno=first))
        if self._settings.exit_when_idle_s is not None:  # on the first host its cluster listens there
            users.listen(self._sockets / CLUSTER_SOCKET)
        self._used = True
        self._check_idle()
        closing.push_async_callback(_end_task, asyncio.ensure_future(self._until_unused(users)))

    async def _until_unused(self, users: Users) -> None:
        """Waits until nobody uses this host's engine: ranks that have left may still be waited for elsewhere."""
        await users.gone()
        self._used = False
        if self._settings.exit_when_idle_s is None:
            self.stop("the process that started it has ended")
        elif any(job.joined for job in self._jobs.running()):
            self._check_idle()
        else:
            self.stop("the last process that used it has ended")

    def _tell_encryption(self) -> None:
        if is_loopback(self._settings.data_host):
            return
        if self._settings.wire.plain_data:
            self._log.warning("connections to other hosts are NOT encrypted (--plain-data)")
        else:
            self._log.info("connections to other hosts are encrypted")

    def _rank_service(self, jobs: Jobs | rank_service.OneJob) -> rank_service.RankService:
        return rank_service.RankService(jobs, self._session.progress, self._session.questions.ask, self._traces.add)

    async def _serve_job(self, socket: Path, job_id: str, uid: int) -> grpc.aio.Server:
        return await rank_service.serve(socket, self._rank_service(rank_service.OneJob(self._jobs, job_id)), uid)

    async def _serve_ranks(self, closing: contextlib.AsyncExitStack) -> None:
        try:
            server = await rank_service.serve(self._rank_socket, self._rank_service(self._jobs))
        except OSError as error:
            raise ConfigError(f"The socket for ranks can't be made: {error}. [BG108]") from error
        closing.callback(self._rank_socket.unlink, missing_ok=True)
        closing.push_async_callback(server.stop, 0.1)

    def _serve_metrics(self, closing: contextlib.AsyncExitStack) -> None:
        if self._settings.metrics_port is None:
            return
        from bagua.daemon.node.host.metrics import NodeCollector, serve_metrics  # costs 60 ms, and few ask for it

        collector = NodeCollector(
            jobs=self._jobs.running,
            connected=lambda: self._session.connected,
            slots=self._settings.slots,
            life=self._keeper.life,
            kills=self._keeper.kills,
            refused_frames=self._refused_frames.total,
            folders=(self._folder.path, self._folder.logs),
        )
        server = serve_metrics(self._settings.metrics_port, collector)
        closing.callback(server.server_close)  # called after ``shutdown``: the last one here comes first
        closing.callback(server.shutdown)

    async def _until_stopped(self, works: Sequence[asyncio.Future[Any]], ready: Ready) -> None:
        """Raises what ends one of ``works``: without its fence a node would let a job run twice."""
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        welcome = asyncio.ensure_future(self._welcome(ready))
        try:
            done, _ = await asyncio.wait((*works, stopped), return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()
        finally:
            stopped.cancel()
            await _end_task(welcome)

    async def _welcome(self, ready: Ready) -> None:
        await self._session.welcomed.wait()
        if self._kept_variables:
            text = "ranks don't get these variables of the daemon; --pass-env names more"
            self._log.info(text, names=" ".join(self._kept_variables))
        ready(
            {
                "node_id": self._folder.node_id,
                "socket": str(self._rank_socket),
                "state_dir": str(self._settings.state_dir),
            }
        )
        self._keeper.ready(f"node {self._folder.node_id} serves the coordinator {self._settings.coordinator}")
        if await self._core.preload():
            self._keeper.load()  # not before it is built: a build would hold up the keeper

    async def _wind_down(self) -> None:
        """Stops the jobs, then lets the coordinator know, as long as it listens."""
        self._log.info("the daemon stops", reason=self._stop_reason)
        text = f"the daemon on node {self._folder.node_id} was stopped ({self._stop_reason})"
        deadline = asyncio.get_running_loop().time() + WIND_DOWN_S
        await self._jobs.stop_all(text, STOP_GRACE_S, STOP_JOBS_S)
        if self._session.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._session.finish()

    # ── what the session asks for ──

    def _hello(self) -> node_pb2.Hello:
        self._streams += 1
        return node_pb2.Hello(
            node_id=self._folder.node_id,
            hostname=socket.gethostname(),
            address=self._settings.data_host,
            slots=self._settings.slots,
            version=bagua.__version__,
            jobs=self._jobs.snapshots(),
            boot_id=self._keeper.boot_id,
            stream=self._streams,
            life=self._keeper.life,
            unpacks=True,
            waits=True,
            protocol=PROTOCOL,
            oldest_protocol=OLDEST,
            wire_version=WIRE_VERSION,
            status=self._status(),
        )

    def _status(self) -> node_pb2.NodeStatus:
        return node_pb2.NodeStatus(draining=self._draining)

    def _directive(self, directive: node_pb2.Directive) -> None:
        match directive.WhichOneof("directive"):
            case "run":
                unpack(directive.run)
                # It may have lain unread while this process, or the machine, stood still.
                if self._fence.over(directive.run.job_id):
                    self._log.warning("an old directive is not followed", job=directive.run.job_id)
                elif not self._stop.is_set():
                    self._jobs.run(directive.run)
            case "stop":
                self._jobs.stop(directive.stop)
            case "read_log":
                self._logs.start(directive.read_log)
            case "end_log":
                self._logs.end(directive.end_log.request_id)
            case "upgrade":
                self._begin_upgrade(directive.upgrade.request_id)
            case "end":
                self._end_when_free(directive.end.exit_code)
            case "trace":
                self._traces.start(directive.trace)
            case "end_trace":
                self._traces.end(directive.end_trace.request_id)
            case "clock":
                self._session.tell_time(directive.clock.request_id)
            case "tune" | "code" | "secrets" as kind:
                self._session.questions.answer(getattr(directive, kind))
            case "welcome" | None:
                pass

    def _end_when_free(self, exit_code: int) -> None:
        self._draining, self._exit_code = True, exit_code
        if not self._jobs.running():
            self.stop("its coordinator has nothing more for it")

    def _begin_upgrade(self, request_id: int) -> None:
        self._upgrade = request_id
        ending = [job.job_id for job in self._jobs.running() if not job.outlives_daemon]
        if ending:
            self._not_upgraded(f"{', '.join(ending)} would end with this daemon: only elastic jobs wait for the next")
        else:
            self._log.info("the daemon that is installed now is to take over")
            self._keeper.renew()

    def _not_upgraded(self, reason: str) -> None:
        self._log.warning("the daemon is not replaced", reason=reason)
        self._session.refuse_upgrade(self._upgrade, reason)

    def _connection_changed(self, connected: bool) -> None:
        if not connected:
            self._logs.end_all()
            self._traces.end_all()
        # A session must not seem to end when this process is killed: its next life goes on with it.
        self._keeper.hold(connections_to(self._settings.coordinator) if connected else [])
        self._check_idle()

    def _job_changed(self, job_id: str) -> None:
        self._session.report(job_id)
        self._fence.update()
        self._check_idle()
        if self._draining and not self._jobs.running():
            self.stop("drained")

    def _patience(self) -> dict[str, float]:
        return {job.job_id: job.spec.patience_s for job in self._jobs.running()}

    def _end_ranks(self, job_id: str, text: str) -> None:
        self._jobs.end(job_id, f"node {self._folder.node_id} {text}", grace_s=0.0)

    def _check_idle(self) -> None:
        jobs = self._jobs.running()
        busy = self._used or any(job.busy or self._session.connected for job in jobs)
        self._idle.update(busy)

    async def _find_log(self, request: node_pb2.ReadLog) -> LogFile:
        """The log that is asked for. Whoever wants to follow a job that is being prepared waits for its start."""
        held = self._jobs.find(request.job_id)
        if isinstance(held, Job) and request.follow:
            await held.prepared.wait()
        log = held.log_of(request.rank) if held else None
        if log is None:
            text = f"node {self._folder.node_id} has no log of rank {request.rank} of job {request.job_id}: "
            raise LookupError(text + "it was not started by this node, or that is long ago")
        return log


async def _refuse_question(message: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("nobody asks a node daemon")


async def _end_task(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def run(settings: Settings, log: FilteringBoundLogger, ready: Ready) -> int:
    """Runs a daemon to its end; its exit code. Raises ConfigError."""
    settings.check()
    folder = open_node_folder(settings, log)
    keeper = KeeperLink(settings.keeper_fd)
    try:
        await keeper.receive_state()  # before the rest, which is made of it
        return await NodeDaemon(settings, folder, keeper, log).run(ready)
    finally:
        keeper.close()
        os.close(folder.lock)
        if settings.leash is not None:  # the folder was made for this daemon alone, and holds its key
            remove_tree(settings.state_dir)
