"""Answers the calls of ranks over the daemon's Unix socket. It only translates."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import bagua
from bagua.base.errors import UnavailableError
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.daemon.node.jobs.job import Job
from bagua.daemon.node.jobs.jobs import EndedJob, Jobs
from bagua.daemon.node.rules import events
from bagua.daemon.node.rules.state import Phase
from bagua.proto import common_pb2, rank_pb2
from bagua.proto.rank_pb2_grpc import RankServiceServicer, add_RankServiceServicer_to_server

SERVICE_NAME = "bagua.v1.RankService"
JOIN_S = 120.0  # how long Join waits for a caller without a deadline
_ANSWER_S = 0.2
_MAX_MESSAGE = 1 << 20
_MAX_METRICS = 64
_MAX_TEXT = 1024


class OneJob:
    """View of one job alone, for ranks that must not reach those of others."""

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self._jobs = jobs
        self._job_id = job_id

    def find(self, job_id: str) -> Job | EndedJob | None:
        return self._jobs.find(job_id) if job_id == self._job_id else None

    async def arrival(self, job_id: str) -> Job | EndedJob:
        return await self._jobs.arrival(job_id if job_id == self._job_id else "")  # "" never arrives


class RankService(RankServiceServicer):
    """``on_progress`` gets progress reports that were found sound. ``ask``: has the coordinator answer a question of
    tuning; raises UnavailableError. ``on_trace`` gets what ranks recorded for a trace."""

    def __init__(
        self,
        jobs: Jobs | OneJob,
        on_progress: Callable[[common_pb2.Progress], None],
        ask: Callable[[common_pb2.TuneRequest], Awaitable[common_pb2.TuneReply]],
        on_trace: Callable[[rank_pb2.TraceReport], None],
    ) -> None:
        self._jobs = jobs
        self._on_progress = on_progress
        self._ask = ask
        self._on_trace = on_trace

    async def Join(self, request: rank_pb2.JoinRequest, context: Any) -> rank_pb2.JoinReply:
        """Waits, as long as the caller does, for the job to arrive and its engine to listen."""
        remaining = context.time_remaining()
        # The words must arrive before the caller gives up.
        patience = JOIN_S if remaining is None else max(0.0, remaining - _ANSWER_S)
        try:
            async with asyncio.timeout(patience):
                job = self._jobs.find(request.job_id) or await self._jobs.arrival(request.job_id)
                if isinstance(job, Job) and job.holds(request.rank):
                    await job.prepared.wait()
        except TimeoutError:
            if self._jobs.find(request.job_id) is None:
                await _no_such_job(request.job_id, context)
            text = f"the engine of job {request.job_id} was not ready in {patience:.0f} s [BG920]"
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, text)
        return await self._admit(job, request, context)

    async def _job_of(self, request: Any, context: Any) -> Job:
        """The job of the rank that calls. Ends the call if it is not here."""
        job = self._jobs.find(request.job_id)
        if not isinstance(job, Job) or not job.knows(request.rank):
            await _no_such_job(request.job_id, context)
        return job

    async def _admit(self, job: Job | EndedJob, request: rank_pb2.JoinRequest, context: Any) -> rank_pb2.JoinReply:
        if isinstance(job, EndedJob):
            reason = job.snapshot().error or "it was stopped"
            await _abort(
                context, grpc.StatusCode.FAILED_PRECONDITION, f"job {request.job_id} is over: {reason} [BG506]"
            )
        if not job.holds(request.rank):
            has = [rank.member for rank in job.state.present]
            text = f"rank {request.rank} of job {request.job_id} is not on this node, which has {has} [BG920]"
            await _abort(context, grpc.StatusCode.NOT_FOUND, text)
        if job.state.failure or job.state.phase is not Phase.RUNNING:
            reason = job.state.failure or "it is being stopped"
            await _abort(
                context, grpc.StatusCode.FAILED_PRECONDITION, f"job {request.job_id} can't go on: {reason} [BG506]"
            )
        if request.wire_version != WIRE_VERSION:
            text = (
                f"This process has bagua {request.version[:64]} (wire version {request.wire_version}), and the daemon "
                f"of its node {bagua.__version__} (wire version {WIRE_VERSION}): they can't talk. Was another release "
                "installed meanwhile? `bagua node upgrade` lets its daemon take over on a node without ranks. [BG924]"
            )
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        if not job.admit(request.rank, request.pid):
            text = f"rank {request.rank} of job {request.job_id} has joined already: "
            text += "a process that a daemon started joins its job once, and not again after destroy_process_group()"
            text += " [BG920]"
            await _abort(context, grpc.StatusCode.ALREADY_EXISTS, text)
        try:
            place = job.spec.place(request.rank)
        except ValueError:
            text = f"job {request.job_id} goes on without rank {request.rank} [BG508]"
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        newcomer = request.rank in job.spec.joining
        nodes = [job.state.node_id] if newcomer else [host.node_id for host in job.spec.hosts]
        return rank_pb2.JoinReply(
            generation=job.generation,
            world_size=place.world_size,
            host_index=place.host_index,
            hosts=[rank_pb2.Host(node_id=node, ranks=ranks) for node, ranks in zip(nodes, place.hosts, strict=True)],
            data_socket=str(job.engine.data_socket),
            data_token=job.tokens[request.rank],
            newcomer=newcomer,
        )

    async def TakesNewcomers(
        self, request: rank_pb2.TakesNewcomersRequest, context: Any
    ) -> rank_pb2.TakesNewcomersReply:
        job = await self._job_of(request, context)
        job.post(events.TakesNewcomers(request.rank))
        return rank_pb2.TakesNewcomersReply()

    async def ReportProgress(self, request: common_pb2.Progress, context: Any) -> rank_pb2.ReportProgressReply:
        job = self._jobs.find(request.job_id)
        if not isinstance(job, Job) or request.rank not in job.spec.ranks:  # not a member number, as everywhere else
            await _no_such_job(request.job_id, context)
        if len(request.metrics) > _MAX_METRICS or len(request.message) > _MAX_TEXT:
            text = f"progress may have {_MAX_METRICS} metrics and a message of {_MAX_TEXT} characters [BG820]"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)
        if request.HasField("sampled"):
            job.trace_step(request.rank, request.sampled)
            request.ClearField("sampled")  # spans have it now
        self._on_progress(request)
        return rank_pb2.ReportProgressReply()

    async def ReportTrace(self, request: rank_pb2.TraceReport, context: Any) -> rank_pb2.TraceReportReply:
        await self._job_of(request, context)
        self._on_trace(request)
        return rank_pb2.TraceReportReply()

    async def Tune(self, request: common_pb2.TuneRequest, context: Any) -> common_pb2.TuneReply:
        await self._job_of(request, context)
        try:
            return await self._ask(request)
        except UnavailableError as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))

    async def DescribeWaits(self, request: rank_pb2.DescribeWaitsRequest, context: Any) -> rank_pb2.DescribeWaitsReply:
        job = self._jobs.find(request.job_id)
        if job is None:
            await _no_such_job(request.job_id, context)
        return rank_pb2.DescribeWaitsReply(waiting=job.describe_waits() if isinstance(job, Job) else "")


async def _no_such_job(job_id: str, context: Any) -> NoReturn:
    text = f"this node daemon holds no job {job_id[:200]!r}, or not that rank of it [BG920]"
    await _abort(context, grpc.StatusCode.NOT_FOUND, text)


async def _abort(context: Any, code: grpc.StatusCode, words: str) -> NoReturn:
    await context.abort(code, words)
    raise AssertionError("abort does not return")


async def serve(path: Path, service: RankService, uid: int = -1) -> grpc.aio.Server:
    """Serves ranks, health and reflection on a Unix socket, for processes of ``uid`` (-1: this process's) and root
    alone. Raises OSError if the socket can't be made."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
            ("grpc.max_metadata_size", 64 << 10),
            ("grpc.so_reuseport", 0),
        ]
    )
    add_RankServiceServicer_to_server(service, server)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the type stubs
    for name in ("", SERVICE_NAME):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    path.unlink(missing_ok=True)  # of a daemon that was killed; the folder is locked, so nobody serves there
    usual = os.umask(0o077)  # the socket is nobody else's from its first moment on
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise OSError(f"can't listen on {path}: {error}") from error
    finally:
        os.umask(usual)
    path.chmod(0o600)
    os.chown(path, uid, -1)
    await server.start()
    return server
