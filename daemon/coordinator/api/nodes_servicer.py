"""Implements NodeService: one stream per daemon, facts to the intake, directives from the session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import sqlalchemy as sa
import structlog

from bagua.base.errors import ConflictError, InvalidRequestError, NotFoundError, ServiceError, UnavailableError
from bagua.base.protocol import misfit
from bagua.daemon.coordinator.api.interceptors import parser
from bagua.daemon.coordinator.rounds.intake import Intake
from bagua.daemon.coordinator.rules.access import check_job, check_node
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.domain import LocalJob, NodeRecord
from bagua.daemon.coordinator.rules.node_leases import NodeLeases
from bagua.daemon.coordinator.rules.translate import checked_hello, checked_progress, local_job
from bagua.daemon.coordinator.store.batch import in_use
from bagua.daemon.coordinator.store.database_errors import failure_words
from bagua.daemon.coordinator.streams.sessions import NodeSession, Sessions
from bagua.daemon.coordinator.streams.watchers import STOPPING, Watchers
from bagua.daemon.coordinator.use.code_archives import CodeArchives
from bagua.daemon.coordinator.use.held_secrets import HeldSecrets
from bagua.daemon.coordinator.use.tuning import Tuning
from bagua.proto import common_pb2, node_pb2

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SERVICE = "bagua.v1.NodeService"
_HELLO_S = 10.0
_TERMS_S = 1.0  # a daemon gets ``welcome`` after so long, however long its introduction waits for the database
_AGAIN_S = 0.5  # between two tries to write it
# Facts taken and large directives sent between two turns of the event loop: a thousand nodes that speak at once must
# not keep a caller waiting.
_AT_ONCE = 4
_LARGE = 4_096
_BEATS = 150  # heartbeats a second that the coordinator asks for, of all daemons together
_OF_LEASE = 0.45  # the longest time between two heartbeats, as a share of the lease
_BEAT_BYTES = 16  # a heartbeat is not larger
_parse = parser(node_pb2.NodeFact.FromString)

log = structlog.get_logger("coordinator.nodes")


@dataclass(eq=False)
class NodeServicer:
    """Serves the streams of node daemons. Errors are turned into status codes by ``CallInterceptor``. ``welcome``
    answers a daemon's introduction; ``silent`` tells other coordinators for how long the database has been silent."""

    intake: Intake
    sessions: Sessions
    watchers: Watchers
    clock: ServiceClock
    welcome: node_pb2.Welcome
    tuning: Tuning
    code: CodeArchives
    secrets: HeldSecrets
    leases: NodeLeases = field(default_factory=NodeLeases)
    silent: Callable[[], node_pb2.DatabaseSilenceReply] = node_pb2.DatabaseSilenceReply

    def __post_init__(self) -> None:
        self._answering: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self.stopping = False

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Makes the handler for a server. Directives that are the same for many daemons come here as bytes already."""
        session = grpc.stream_stream_rpc_method_handler(
            self.Session,
            request_deserializer=bytes,
            response_serializer=_serialized,
        )
        silence = grpc.unary_unary_rpc_method_handler(
            self.DatabaseSilence,
            request_deserializer=node_pb2.DatabaseSilenceRequest.FromString,
            response_serializer=node_pb2.DatabaseSilenceReply.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Session": session, "DatabaseSilence": silence})

    async def DatabaseSilence(
        self, request: node_pb2.DatabaseSilenceRequest, context: Context
    ) -> node_pb2.DatabaseSilenceReply:
        """Says for how long this coordinator has not reached its database."""
        return self.silent()

    async def Session(self, request_iterator: Any, context: Context) -> None:
        """Lasts until either side ends it, or the daemon is silent for a lease."""
        hello = await self._hello(context)
        node = checked_hello(hello)
        jobs = [local_job(fact) for fact in hello.jobs]
        for job in jobs:
            check_job(job.job_id)
        await self._check_unique(node.node_id, node.boot_id)
        session = NodeSession(node.node_id, node.boot_id, node.hostname, hello.stream, hello.life, hello.unpacks)
        if not self.sessions.youngest(session):
            raise UnavailableError("This daemon has opened another stream since. [BG802]")
        session.note_heard(self.clock.now())
        reason = "the stream ended"
        # From here on something of the session may be known to others or be written: whatever happens, it is taken
        # back, without a wait that could be cancelled.
        self.sessions.add(session)
        introduction = asyncio.create_task(self._introduce(session, node, jobs, hello.waits))
        introduction.add_done_callback(lambda task: task.cancelled() or task.exception())  # read also if nobody waits
        try:
            await asyncio.wait([introduction], timeout=_TERMS_S if hello.waits else None)
            if not introduction.done():
                session.early = asyncio.Queue(1)  # one place: the newest answer says all
                await context.write(node_pb2.Directive(terms=self._terms(session)))
            else:
                await self._greet(session, node, introduction, context)
            reason = await self._serve(session, node, introduction, context)
        finally:
            introduction.cancel()
            if self.sessions.remove(session):
                log.info("node_disconnected", node=session.node_id, reason=session.close_reason or reason)
                if not self.stopping:  # a daemon whose session ends for that reason is no lost one
                    self.intake.node_gone(session)
        if session.closed.is_set():
            raise UnavailableError(f"{session.close_reason} [BG802]")

    async def _introduce(self, session: NodeSession, node: NodeRecord, jobs: list[LocalJob], waits: bool) -> bool:
        """Writes that the node is there; returns True if its daemon was restarted. ``waits``: until the database is
        back, for which the daemon waits as well."""
        told = False
        while True:
            try:
                return await self.intake.introduce(session, node, jobs)
            except (UnavailableError, sa.exc.DBAPIError) as error:
                if not waits or self.stopping or session.closed.is_set():
                    raise
                if not told:
                    log.warning("node_waits", node=node.node_id, reason=str(error))
                told = True
            await asyncio.sleep(_AGAIN_S)

    async def _greet(
        self, session: NodeSession, node: NodeRecord, introduction: asyncio.Task[bool], context: Context
    ) -> None:
        restarted = introduction.result()
        log.info("node_connected", node=node.node_id, hostname=node.hostname, slots=node.slots, restarted=restarted)
        self.sessions.upgrades.introduced(session)
        session.early = None
        await context.write(node_pb2.Directive(welcome=self._terms(session)))

    def _terms(self, session: NodeSession) -> node_pb2.Welcome:
        terms = node_pb2.Welcome()
        terms.CopyFrom(self.welcome)
        if (grant := self.leases.grant(session.node_id)) is not None:
            terms.grant.CopyFrom(grant)
        return terms

    async def _hello(self, context: Context) -> node_pb2.Hello:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await context.read()
        except TimeoutError as error:
            raise InvalidRequestError(f"no hello came within {_HELLO_S:g} s [BG820]") from error
        fact = _parse(first) if isinstance(first, bytes) else node_pb2.NodeFact()
        if fact.WhichOneof("fact") != "hello":
            raise InvalidRequestError("the first message of a session must be a hello [BG820]")
        if self.stopping:
            raise UnavailableError(f"{STOPPING} [BG802]")
        check_node(fact.hello.node_id)
        hello = fact.hello
        whose = f"The daemon on node {hello.node_id[:64]}"
        if words := misfit(hello.version[:64], hello.protocol, hello.oldest_protocol, whose):
            raise ConflictError(words)
        return hello

    async def _check_unique(self, node_id: str, boot_id: str) -> None:
        """Decides between two daemons with one id. The newer one wins only if the older one says nothing for longer
        than a heartbeat.
        """
        older = self.sessions.get(node_id)
        if older is None or older.boot_id == boot_id or older.closed.is_set():
            return
        older.heard.clear()  # a word from now on counts
        interval = older.heartbeat_s or self.welcome.heartbeat_s
        waits = [asyncio.ensure_future(older.heard.wait()), asyncio.ensure_future(older.closed.wait())]
        await asyncio.wait(waits, timeout=1.5 * interval, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if older.heard.is_set() and not older.closed.is_set():
            raise in_use(node_id, older.hostname)

    async def _serve(
        self, session: NodeSession, node: NodeRecord, introduction: asyncio.Task[bool], context: Context
    ) -> str:
        """Runs both directions until one ends; returns why."""
        tasks = {
            asyncio.create_task(self._read(session, context)): "the daemon closed the stream",
            asyncio.create_task(self._write(session, node, introduction, context)): "the stream broke",
            asyncio.create_task(session.closed.wait()): "closed by the coordinator",
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return session.close_reason or next(tasks[task] for task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, session: NodeSession, context: Context) -> None:
        while True:
            data = await context.read()
            if not isinstance(data, bytes):  # end of stream
                return
            session.note_heard(self.clock.now())
            if session.early is not None:
                self.intake.heard(session)
            if len(data) <= _BEAT_BYTES:  # a heartbeat takes no turn: a lease must not end for want of one
                self._take(session, _parse(data))
                continue
            async with self._turn:
                self._take(session, _parse(data))
                await asyncio.sleep(0)

    def _take(self, session: NodeSession, fact: node_pb2.NodeFact) -> None:
        kind = fact.WhichOneof("fact")
        if kind == "heartbeat":
            if fact.heartbeat.seq:
                self._acknowledge(session, fact.heartbeat.seq)
        elif kind == "job":
            check_job(fact.job.job_id)
            self.intake.fact(session, local_job(fact.job))
        elif kind == "progress":
            check_job(fact.progress.job_id)
            self.watchers.report(checked_progress(fact.progress))
        elif kind == "log":
            self.sessions.route(session, fact.log.request_id, fact.log.chunk)
        elif kind == "trace":
            self.sessions.route(session, fact.trace.request_id, fact.trace)
        elif kind == "clock":
            self.sessions.route(session, fact.clock.request_id, fact.clock)
        elif kind == "status":
            self.intake.leaving(session, fact.status.draining)
        elif kind == "upgrade_refusal":
            self.sessions.upgrades.refused(session, fact.upgrade_refusal)
        elif kind == "tune":
            check_job(fact.tune.request.job_id)
            tune = node_pb2.TuneAnswer(request_id=fact.tune.request_id)
            self._begin(session, kind, tune, self._answer_tune(fact.tune.request, tune))
        elif kind == "code":
            check_job(fact.code.job_id)
            code = node_pb2.CodeAnswer(request_id=fact.code.request_id)
            self._begin(session, kind, code, self._answer_code(fact.code, code))
        elif kind == "secrets":
            check_job(fact.secrets.job_id)
            secrets = node_pb2.SecretsAnswer(request_id=fact.secrets.request_id)
            self._begin(session, kind, secrets, self._answer_secrets(session.node_id, fact.secrets, secrets))
        elif kind == "hello":
            raise InvalidRequestError("a hello comes first and once [BG820]")

    async def _answer_tune(self, request: common_pb2.TuneRequest, answer: node_pb2.TuneAnswer) -> None:
        answer.reply.CopyFrom(await self.tuning.answer(request))

    async def _answer_code(self, question: node_pb2.CodeQuestion, answer: node_pb2.CodeAnswer) -> None:
        """Gives one piece of an archive. A daemon asks for the next when it has this one."""
        answer.data = await self.code.piece(question.job_id, question.piece)

    async def _answer_secrets(
        self, node_id: str, question: node_pb2.SecretsQuestion, answer: node_pb2.SecretsAnswer
    ) -> None:
        """Gives a job's secrets to nodes of the job alone."""
        if not self.intake.places(question.job_id, node_id):
            raise NotFoundError(f"job {question.job_id[:64]} has no part on node {node_id} [BG820]")
        answer.values.update(self.secrets.of(question.job_id))

    def _begin(self, session: NodeSession, kind: str, answer: Any, fill: Coroutine[Any, Any, None]) -> None:
        """Sends the answer to a question, filled by a task. Errors go back in words, for the job to go on or to end."""

        async def work() -> None:
            told = answer.reply if kind == "tune" else answer
            try:
                await fill
            except ServiceError as error:
                told.error = str(error)
            except Exception as error:
                log.exception("not_answered", question=kind, once_a_minute=kind)
                told.error = f"{failure_words(error)} [BG825]"
            session.send(node_pb2.Directive(**{kind: answer}))

        task = asyncio.create_task(work())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _acknowledge(self, session: NodeSession, seq: int) -> None:
        """Answers four heartbeats within the time after which the daemon ends its ranks: the daemon goes on asking
        until it has an answer, and an answer costs as much as a heartbeat. For a lease after a standstill of this
        process each is answered: a daemon that stood still as well holds its ranks until it has an answer to a
        heartbeat that it sent since."""
        now = self.clock.now()
        if session.early is not None:  # its introduction waits for the database
            with contextlib.suppress(asyncio.QueueEmpty):
                session.early.get_nowait()  # this one says it, too
            session.early.put_nowait(node_pb2.HeartbeatAck(seq=seq, grant=self.leases.grant(session.node_id)))
            return
        due = session.acked_clock + self.welcome.fence_s / 4
        if not session.acked_clock or now >= due or now <= self.clock.woke + self.welcome.lease_s:
            session.acked_clock = now
            session.heartbeat_s = heartbeat_interval(self.welcome, len(self.sessions))
            grant = self.leases.grant(session.node_id)
            ack = node_pb2.HeartbeatAck(seq=seq, heartbeat_s=session.heartbeat_s, grant=grant)
            session.send(node_pb2.Directive(ack=ack))

    async def _write(
        self, session: NodeSession, node: NodeRecord, introduction: asyncio.Task[bool], context: Context
    ) -> None:
        while session.early is not None:
            early = asyncio.ensure_future(session.early.get())
            await asyncio.wait([early, introduction], return_when=asyncio.FIRST_COMPLETED)
            if introduction.done():
                early.cancel()
                await self._greet(session, node, introduction, context)
            else:
                await context.write(node_pb2.Directive(ack=early.result()))
        while True:
            directive = await session.outgoing.get()
            if isinstance(directive, bytes) and len(directive) > _LARGE:
                async with self._turn:  # not held while writing: a daemon may not read
                    await asyncio.sleep(0)
            await context.write(directive)


def heartbeat_interval(welcome: node_pb2.Welcome, nodes: int) -> float:
    """Seconds between two heartbeats of a daemon where ``nodes`` are connected: about ``_BEATS`` come a second, more
    only where a daemon would not send two within its lease."""
    return max(welcome.heartbeat_s, min(nodes / _BEATS, _OF_LEASE * welcome.lease_s))


def _serialized(directive: node_pb2.Directive | bytes) -> bytes:
    return directive if isinstance(directive, bytes) else directive.SerializeToString()
