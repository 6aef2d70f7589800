"""Implements JobService, which the CLI and users' programs call. It only translates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from bagua.base.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    UnavailableError,
)
from bagua.daemon.coordinator.api.response_cache import Answers
from bagua.daemon.coordinator.rounds import requests
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState, RankState
from bagua.daemon.coordinator.rules.identity import CURRENT, EVERYWHERE, Role
from bagua.daemon.coordinator.rules.translate import (
    checked_number,
    checked_spec,
    event_message,
    node_message,
)
from bagua.daemon.coordinator.store.listing import page
from bagua.daemon.coordinator.streams import traces
from bagua.daemon.coordinator.streams.logs import LogReader, asked_ranks, check_tail
from bagua.daemon.coordinator.streams.sessions import Sessions
from bagua.daemon.coordinator.streams.watchers import Watcher, Watchers
from bagua.daemon.coordinator.use.accounts import check_namespace, check_unix_user
from bagua.daemon.coordinator.use.code_archives import CodeArchives
from bagua.daemon.coordinator.use.held_secrets import HeldSecrets
from bagua.daemon.coordinator.use.service import MAX_EVENTS, Service, new_job_id
from bagua.daemon.coordinator.use.tuning import Tuning
from bagua.proto import common_pb2, job_pb2, job_pb2_grpc, node_pb2

# A watcher of 8,000 ranks is not shown each of their steps: the whole job is sent each time.
_PAUSE_PER_RANK_S = 50e-6
_SLOWEST_S = 1.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(eq=False)
class JobServicer(job_pb2_grpc.JobServiceServicer):
    """Errors of the service are turned into status codes by ``CallInterceptor``."""

    service: Service
    sessions: Sessions
    watchers: Watchers
    tuning: Tuning
    code: CodeArchives
    secrets: HeldSecrets

    def __post_init__(self) -> None:
        self._answers = Answers()

    async def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Context) -> job_pb2.Job:
        """A new job, or the first one with the same idempotency key."""
        missing = sorted(set(request.spec.secrets) - set(request.secrets))
        if missing:  # a spec that came out of an answer
            raise InvalidRequestError(
                f"secrets: the value of {missing[0][:200]!r} is missing. Give it with the job. [BG812]"
            )
        del request.spec.secrets[:]
        request.spec.secrets.extend(sorted(request.secrets))
        spec = checked_spec(request.spec)
        namespace, unix_user = _chosen_namespace(request.namespace), _chosen_user(request.unix_user)
        if request.spec.HasField("code"):
            await self.code.need(request.spec.code, CURRENT.get().namespace)
        job_id = new_job_id()
        self.secrets.hold(job_id, request.secrets)  # before the job is written: a daemon may ask for them at once
        try:
            job = await self.service.submit(spec, request.idempotency_key, job_id, namespace, unix_user)
        except BaseException:
            self.secrets.forget(job_id)
            raise
        if job.job_id == job_id:
            self.secrets.made(job_id)
        else:  # it was submitted before
            self.secrets.forget(job_id)
        return await self._answer(job)

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Context) -> job_pb2.Job:
        message = await self._answer(await self.service.job(request.job_id))
        line = await self.tuning.line(message.job_id)
        reports = self.watchers.reports(message.job_id)
        if line or reports:
            # The message is shared by all who ask: it must not be changed.
            shown = job_pb2.Job()
            shown.CopyFrom(message)
            shown.tuning = line
            shown.reports.extend(reports)
            return shown
        return message

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Context) -> job_pb2.ListJobsReply:
        """Returns a page of summaries of jobs."""
        try:
            states = [JobState(state) for state in request.states]
        except ValueError as error:
            raise InvalidRequestError(f"states: {error} [BG820]") from error
        own = CURRENT.get().namespace
        if request.namespace and own not in (EVERYWHERE, request.namespace):
            return job_pb2.ListJobsReply()  # as of a namespace without jobs
        shown = request.namespace or own
        jobs, token = await self.service.jobs(states, request.limit, request.page_token, shown)
        for job in jobs:
            if (progress := self.watchers.progress(job.job_id)) is not None:
                job.progress.CopyFrom(progress)
        return job_pb2.ListJobsReply(jobs=jobs, next_page_token=token)

    async def FindJob(self, request: job_pb2.FindJobRequest, context: Context) -> job_pb2.FindJobReply:
        """An id by its beginning."""
        return job_pb2.FindJobReply(job_id=await self.service.find(request.prefix, CURRENT.get().namespace))

    async def ListEvents(self, request: job_pb2.ListEventsRequest, context: Context) -> job_pb2.ListEventsReply:
        """The next 1,000 at most."""
        events = await self.service.events(request.job_id, checked_number("after_seq", request.after_seq))
        return job_pb2.ListEventsReply(events=[event_message(event) for event in events])

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Context) -> job_pb2.Job:
        return await self._answer(await self.service.cancel(request.job_id, request.reason))

    async def ScaleJob(self, request: job_pb2.ScaleJobRequest, context: Context) -> job_pb2.Job:
        """Accepts the request, and answers before it is carried out."""
        return await self._wish(request.job_id, lambda job: requests.scale(job, request.nodes))

    async def PauseJob(self, request: job_pb2.PauseJobRequest, context: Context) -> job_pb2.Job:
        """Accepts the request, and answers before it is carried out."""
        return await self._wish(request.job_id, requests.pause)

    async def ResumeJob(self, request: job_pb2.ResumeJobRequest, context: Context) -> job_pb2.Job:
        """Accepts the request, and answers before it is carried out."""
        return await self._wish(request.job_id, requests.resume)

    async def WatchJob(self, request: job_pb2.WatchJobRequest, context: Context) -> AsyncIterator[job_pb2.JobUpdate]:
        """Events, the job, progress; until the job has ended."""
        seen = checked_number("after_seq", request.after_seq)
        sent: job_pb2.Job | None = None
        with self.watchers.watch(request.job_id) as watcher:
            changed = True
            progress: list[common_pb2.Progress] = []
            while True:
                for report in progress:
                    yield job_pb2.JobUpdate(progress=report)
                while changed:
                    job, events = await self.service.job_and_events(request.job_id, seen)
                    for event in events:
                        yield job_pb2.JobUpdate(event=event_message(event))
                        seen = event.seq
                    if len(events) == MAX_EVENTS:  # there may be more
                        continue
                    message = await self._answer(job)
                    if message != sent:
                        yield job_pb2.JobUpdate(job=message)
                        sent = message
                        if not job.state.terminal:  # what changes meanwhile comes at once
                            await asyncio.sleep(min(_SLOWEST_S, len(job.ranks) * _PAUSE_PER_RANK_S))
                    if job.state.terminal:
                        return
                    break
                changed, progress = await watcher.wait()

    async def ReadLogs(self, request: job_pb2.ReadLogsRequest, context: Context) -> AsyncIterator[common_pb2.LogChunk]:
        """Chunks of all ranks asked for, mixed. With ``follow`` a job that is not placed yet is waited for."""
        check_tail(request)
        with self.watchers.watch(request.job_id) as watcher:
            job = await self.service.job(request.job_id)
            while request.follow and not job.ranks and not job.state.terminal:
                await watcher.wait()
                job = await self.service.job(request.job_id)
            if not job.ranks:
                return
            ranks = asked_ranks(request, job.homes)
            reader = LogReader(self.sessions, job, ranks, request, lambda: self._is_over(job.job_id))
            grows = job.spec.elastic and request.follow and not request.ranks
            newcomers = asyncio.create_task(self._add_newcomers(reader, watcher, job.job_id)) if grows else None
            try:
                async for chunk in reader.chunks():
                    yield chunk
            finally:
                reader.close()
                if newcomers is not None:
                    newcomers.cancel()

    async def TraceJob(self, request: job_pb2.TraceJobRequest, context: Context) -> AsyncIterator[job_pb2.TraceChunk]:
        """Parts as nodes send them, then the clocks of all nodes."""
        steps, seconds = traces.check(request)
        job = await self.service.job(request.job_id)
        traces.check_runs(job)
        tracing = traces.Tracing(self.sessions, job, steps, seconds)
        try:
            async for chunk in tracing.chunks():
                yield chunk
        finally:
            tracing.close()

    async def _is_over(self, job_id: str) -> bool:
        try:
            return (await self.service.job(job_id)).state.terminal
        except NotFoundError:  # it was too old to keep
            return True

    async def _add_newcomers(self, reader: LogReader, watcher: Watcher, job_id: str) -> None:
        with contextlib.suppress(ServiceError):  # of the end: the reader reads what it has
            while not (job := await self.service.job(job_id)).state.terminal:
                started = (rank for part in job.parts for rank in part.ranks if rank.state is not RankState.WAITING)
                reader.add({rank.number: rank.node_id for rank in started})
                await watcher.wait()

    async def ListNodes(self, request: job_pb2.ListNodesRequest, context: Context) -> job_pb2.ListNodesReply:
        """A page of all nodes that were ever seen."""
        shown, token = page(self.service.nodes(), lambda view: view.node_id, request.limit, request.page_token)
        return self._answers.nodes(shown, self.service.wall(), token)

    async def DrainNode(self, request: job_pb2.DrainNodeRequest, context: Context) -> job_pb2.DrainNodeReply:
        """Returns before it is empty."""
        if request.gone:
            view, jobs = self.service.gone(request.node_id, request.gone)
            return job_pb2.DrainNodeReply(node=node_message(view), jobs=jobs)
        view, jobs = await self.service.drain(request.node_id, True, request.this_run)
        session = self.sessions.get(request.node_id)
        if request.HasField("exit_code") and session is not None:
            session.send(node_pb2.Directive(end=node_pb2.EndDaemon(exit_code=request.exit_code & 0xFF)))
        return job_pb2.DrainNodeReply(node=node_message(view), jobs=jobs)

    async def UndrainNode(self, request: job_pb2.UndrainNodeRequest, context: Context) -> job_pb2.Node:
        view, _ = await self.service.drain(request.node_id, False)
        return node_message(view)

    async def UpgradeNode(self, request: job_pb2.UpgradeNodeRequest, context: Context) -> job_pb2.UpgradeNodeReply:
        """Returns when the next daemon has come."""
        former = self.service.node(request.node_id)
        session = self.sessions.get(request.node_id)
        if session is None:
            elsewhere = "connected to another coordinator: ask that one (--coordinator)"
            away = "not connected: start its daemon, which is of the installed version then"
            raise UnavailableError(f"Node {request.node_id} is {elsewhere if former.connected else away}. [BG802]")
        await self.sessions.upgrades.upgrade(session)
        node = node_message(self.service.node(request.node_id))
        return job_pb2.UpgradeNodeReply(node=node, former_version=former.version)

    async def ListTuning(self, request: job_pb2.ListTuningRequest, context: Context) -> job_pb2.ListTuningReply:
        return job_pb2.ListTuningReply(tunings=await self.tuning.studies(CURRENT.get().namespace))

    async def GetTuning(self, request: job_pb2.GetTuningRequest, context: Context) -> job_pb2.Tuning:
        """Finds a study by the beginning of its id."""
        return await self.tuning.study(request.prefix, CURRENT.get().namespace)

    async def ForgetTuning(self, request: job_pb2.ForgetTuningRequest, context: Context) -> job_pb2.ForgetTuningReply:
        """Deletes one study, or all."""
        namespace = CURRENT.get().namespace
        return job_pb2.ForgetTuningReply(ids=await self.tuning.forget(request.prefix, request.all, namespace))

    async def FindCode(self, request: common_pb2.CodeArchive, context: Context) -> job_pb2.FindCodeReply:
        """Keeps it for a job that is to come."""
        return job_pb2.FindCodeReply(held=await self.code.find(request, CURRENT.get().namespace))

    async def PutCode(
        self, request_iterator: AsyncIterator[job_pb2.PutCodeRequest], context: Context
    ) -> job_pb2.FindCodeReply:
        """Returns when it is stored."""
        await self.code.put(aiter(request_iterator), CURRENT.get().namespace)
        return job_pb2.FindCodeReply(held=True)

    async def _wish(self, job_id: str, wish: Callable[[JobRecord], requests.Wished]) -> job_pb2.Job:
        return await self._answer(await self.service.request(job_id, wish))

    async def _answer(self, job: JobRecord) -> job_pb2.Job:
        return await self._answers.job(job, self.watchers.progress(job.job_id), self.service.growth(job))


def _chosen_namespace(asked: str) -> str:
    """Returns the namespace for a job of this caller; ``asked`` empty: the default one. Raises ForbiddenError,
    InvalidRequestError.
    """
    own = CURRENT.get().namespace
    if asked:
        check_namespace(asked)
    if own == EVERYWHERE:
        return asked
    if asked not in ("", own):
        raise ForbiddenError(f"Your account submits to the namespace {own}, not to {asked}. [BG805]")
    return own


def _chosen_user(asked: str) -> str:
    """The Unix user of a job of this caller; empty: none. Raises ForbiddenError, InvalidRequestError."""
    caller = CURRENT.get()
    if asked in ("", caller.unix_user):
        return caller.unix_user
    check_unix_user(asked)
    if caller.role is not Role.ADMIN:
        own = f"run as {caller.unix_user}" if caller.unix_user else "have no Unix user"
        raise ForbiddenError(f"Jobs of your account {own}: only administrators choose another one, as {asked}. [BG805]")
    return asked
