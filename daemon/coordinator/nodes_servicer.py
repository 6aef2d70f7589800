"""NodeService: one stream per daemon. Facts go to the service one after the other, directives come from the session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
import structlog

from bagua.base.errors import ConflictError, InvalidRequestError, UnavailableError
from bagua.daemon.coordinator import scopes
from bagua.daemon.coordinator.domain import LocalJob, Phase
from bagua.daemon.coordinator.reconciler import Reconciler
from bagua.daemon.coordinator.service import Observed, Service
from bagua.daemon.coordinator.sessions import NodeSession, Sessions
from bagua.daemon.coordinator.translate import checked_hello, checked_progress, local_job
from bagua.daemon.coordinator.watchers import STOPPING, Watchers
from bagua.daemon.coordinator.worker import Worker
from bagua.proto import node_pb2, node_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_HELLO_S = 10.0
_LEASE_PARTS = 10

log = structlog.get_logger("coordinator.nodes")


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Errors of the service are turned into status codes by ``interceptors.Errors``."""

    def __init__(
        self,
        worker: Worker,
        service: Service,
        sessions: Sessions,
        watchers: Watchers,
        reconciler: Reconciler,
        clock: Callable[[], float],
        heartbeat_s: float,
        lease_s: float,
    ) -> None:
        self._worker = worker
        self._service = service
        self._sessions = sessions
        self._watchers = watchers
        self._reconciler = reconciler
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self.stopping = False

    async def Session(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        """Lasts until either side ends it, or the daemon is silent for a lease."""
        hello = await self._hello(context)
        node = checked_hello(hello)
        jobs = [local_job(fact) for fact in hello.jobs]
        await self._check_unique(node.node_id, node.boot_id)
        session = NodeSession(node.node_id, node.boot_id, node.hostname)
        restarted = await self._worker.call(self._service.node_hello, node)
        self._sessions.add(session)
        log.info("node_connected", node=node.node_id, hostname=node.hostname, slots=node.slots, restarted=restarted)
        reason = "the stream ended"
        try:
            await context.write(
                node_pb2.Directive(welcome=node_pb2.Welcome(heartbeat_s=self._heartbeat_s, lease_s=self._lease_s))
            )
            await self._take_stock(session, jobs)
            reason = await self._serve(session, context)
        finally:
            await asyncio.shield(self._leave(session, reason))
        if session.close_reason:
            raise UnavailableError(session.close_reason)

    async def _hello(self, context: Context) -> node_pb2.Hello:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await context.read()
        except TimeoutError as error:
            raise InvalidRequestError(f"no hello came within {_HELLO_S:g} s") from error
        if not isinstance(first, node_pb2.NodeFact) or first.WhichOneof("fact") != "hello":
            raise InvalidRequestError("the first message of a session must be a hello")
        if self.stopping:
            raise UnavailableError(STOPPING)
        scopes.check_node(first.hello.node_id)
        return first.hello

    async def _check_unique(self, node_id: str, boot_id: str) -> None:
        """Two daemons with one id: the newer wins only if the older says nothing for longer than a heartbeat."""
        older = self._sessions.get(node_id)
        if older is None or older.boot_id == boot_id or older.closed.is_set():
            return
        older.heard.clear()
        waits = [asyncio.ensure_future(older.heard.wait()), asyncio.ensure_future(older.closed.wait())]
        await asyncio.wait(waits, timeout=1.5 * self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if older.heard.is_set() and not older.closed.is_set():
            raise ConflictError(
                f"The node id {node_id!r} is in use by another daemon, on {older.hostname}. Give each daemon a state "
                "folder or --node-id of its own."
            )

    async def _take_stock(self, session: NodeSession, jobs: list[LocalJob]) -> None:
        """Compares what the node holds with what it should hold."""
        for job in jobs:
            await self._observe(session, job)
        held = {job.job_id for job in jobs}
        expected = await self._worker.call(self._service.node_jobs, session.node_id)
        for job_id in expected:
            if job_id not in held:
                self._after(
                    job_id, await self._worker.call(self._service.forget, session.node_id, session.boot_id, job_id)
                )
        self._reconciler.wake_all(expected)
        self._reconciler.wake_pending()

    async def _serve(self, session: NodeSession, context: Context) -> str:
        """Runs both directions until one ends; returns why."""
        tasks = {
            asyncio.create_task(self._read(session, context)): "the daemon closed the stream",
            asyncio.create_task(self._write(session, context)): "the stream broke",
            asyncio.create_task(self._closed(session)): "closed by the coordinator",
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
            read = asyncio.ensure_future(context.read())
            try:
                if not await self._comes(read):
                    session.close(f"nothing was heard of this daemon for {self._lease_s:g} s")
                    return
                fact = await read
            finally:
                read.cancel()
            if not isinstance(fact, node_pb2.NodeFact):  # end of stream
                return
            session.note_heard()
            await self._take(session, fact)

    async def _comes(self, read: asyncio.Future[Any]) -> bool:
        """Whether ``read`` is done within a lease. The lease is waited for in parts, so that time in which this process
        stood still (a suspended machine, a starved processor) counts as one part at most: what daemons sent
        meanwhile lies unread, and is read in the next."""
        for _ in range(_LEASE_PARTS):
            done, _ = await asyncio.wait([read], timeout=self._lease_s / _LEASE_PARTS)
            if done:
                return True
        return False

    async def _take(self, session: NodeSession, fact: node_pb2.NodeFact) -> None:
        kind = fact.WhichOneof("fact")
        if kind == "job":
            await self._observe(session, local_job(fact.job))
        elif kind == "progress":
            scopes.check_job(fact.progress.job_id)
            self._watchers.report(checked_progress(fact.progress))
        elif kind == "log":
            self._sessions.log_reply(session, fact.log)
        elif kind == "hello":
            raise InvalidRequestError("a hello comes first and once")

    async def _observe(self, session: NodeSession, fact: LocalJob) -> None:
        scopes.check_job(fact.job_id)
        result = await self._worker.call(self._service.observe, session.node_id, session.boot_id, fact)
        self._after(fact.job_id, result)
        if result.unknown and fact.phase is not Phase.STOPPED:
            stop = node_pb2.StopJob(
                job_id=fact.job_id,
                generation=fact.generation,
                reason="the coordinator does not know this job or has replaced this generation",
            )
            session.tell(node_pb2.Directive(stop=stop))

    def _after(self, job_id: str, result: Observed) -> None:
        if result.changed:
            self._watchers.notify(job_id)
            self._reconciler.wake(job_id)
        if result.freed:
            self._reconciler.wake_pending()

    async def _write(self, session: NodeSession, context: Context) -> None:
        while True:
            await context.write(await session.outgoing.get())

    async def _closed(self, session: NodeSession) -> None:
        await session.closed.wait()

    async def _leave(self, session: NodeSession, reason: str) -> None:
        if not self._sessions.remove(session):
            return
        log.info("node_disconnected", node=session.node_id, reason=reason)
        with contextlib.suppress(RuntimeError):  # the worker is closed: the coordinator has stopped
            jobs = await self._worker.call(self._service.node_lost, session.node_id, session.boot_id, self._clock())
            self._reconciler.wake_all(jobs)
