"""The synchronous client of JobService."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event as Flag
from types import TracebackType
from typing import Literal, TypeVar, Unpack, overload

import grpc
from google.protobuf.message import Message

from bagua.base.errors import ConfigError, InvalidRequestError, ServiceError, UnavailableError
from bagua.base.job_options import JobOptions
from bagua.base.rpc import CHANNEL_OPTIONS, MAX_SPEC_BYTES, error_of, too_large_spec
from bagua.base.security import TlsFiles, call_metadata, channel_credentials, check_dial_address, handshake_words
from bagua.client.accounts import Accounts
from bagua.client.describe import island_size
from bagua.client.packing import Packed, pack
from bagua.client.reach import find_reach
from bagua.client.specification import job_spec
from bagua.client.tracing import traced
from bagua.client.watching import Merged
from bagua.proto import common_pb2, job_pb2, job_pb2_grpc
from bagua.timeline.trace import Clock, Source, Span, Trace

PAGE = 1_000  # jobs in one answer
TIMEOUT_S = 15.0  # of every call that is not a stream
DEFAULT_TRACE_STEPS = 5  # the coordinator's
TRACE_GRACE_S = 60.0  # the coordinator ends a trace sooner
UPGRADE_S = 320.0  # of a call that may build a core on a node
UPLOAD_BYTES = 512 << 10  # of an archive in one message
UPLOAD_S = 600.0  # of an upload
LOG_PATIENCE_S = 3.0  # how long ``watch`` waits for output after the end of a job
PATIENCE_S = 60.0  # how long ``watch`` waits for a coordinator that is being restarted
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0


Reply = TypeVar("Reply")


class Client:
    """Calls a coordinator. ``address`` is host:port, ``tls`` a folder with ca.pem, cert.pem, key.pem or their paths;
    what is not given is found as ``find_reach`` says. Raises ConfigError for a missing credential, or for an address
    beyond loopback without TLS. All methods raise ServiceError (UnavailableError if nobody answers, NotFoundError,
    InvalidRequestError, ...) with words."""

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        tls: TlsFiles | Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        reach = find_reach(address, token, tls)
        check_dial_address(reach.address, reach.tls)
        self.address = reach.address
        self._timeout_s = timeout_s
        self._metadata = tuple(call_metadata(reach.token))
        self._tls = reach.tls
        self._closed = Flag()
        self._open()

    def _open(self) -> None:
        if self._tls is None:
            self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        else:
            self._certificates = self._tls.read()
            credentials = channel_credentials(self._tls)
            self._channel = grpc.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)
        self._stub = job_pb2_grpc.JobServiceStub(self._channel)
        self.accounts = Accounts(self._channel, self._call)
        """Tokens and the audit log."""

    def _renew(self) -> None:
        """Forgets a connection that failed. If certificates were replaced, the next call connects with the new ones."""
        with suppress(ConfigError):  # half of them were replaced
            if self._tls is not None and self._tls.read() != self._certificates and not self._closed.is_set():
                old = self._channel
                self._open()
                old.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls that run."""
        self._closed.set()
        self._channel.close()

    # ---- jobs

    @overload
    def submit(
        self,
        spec: common_pb2.JobSpec,
        idempotency_key: str = "",
        *,
        namespace: str = "",
        secrets: Mapping[str, str] | None = None,
        unix_user: str = "",
    ) -> job_pb2.Job: ...

    @overload
    def submit(
        self,
        *,
        script: str | os.PathLike[str],
        working_dir: str | os.PathLike[str] | None = None,
        idempotency_key: str = "",
        namespace: str = "",
        secrets: Mapping[str, str] | None = None,
        unix_user: str = "",
        **arguments: Unpack[JobOptions],
    ) -> job_pb2.Job: ...

    def submit(
        self,
        spec: common_pb2.JobSpec | None = None,
        idempotency_key: str = "",
        *,
        script: str | os.PathLike[str] = "",
        working_dir: str | os.PathLike[str] | None = None,
        namespace: str = "",
        secrets: Mapping[str, str] | None = None,
        unix_user: str = "",
        **arguments: Unpack[JobOptions],
    ) -> job_pb2.Job:
        """Submits a job: a specification, or a ``script`` with the ``arguments`` that ``JobOptions`` lists.

            client.submit(script="train.py", nnodes=2, nproc_per_node=2, args=["--epochs", "3"], working_dir=".")

        The same ``idempotency_key`` again returns the first job: with one, a call that failed half-way can be repeated.
        ``working_dir``: a folder of this machine whose files are shipped to the nodes, where the ranks run in a copy;
        ``script`` is a path in it. ``namespace``: where the job goes; default: the account's own. ``secrets``:
        variables of the ranks, name -> value, that the service keeps in memory alone. ``unix_user``: of the ranks,
        where daemons run them as their submitter; default: the account's. Raises
        InvalidRequestError if the specification is too large, ConfigError for arguments, or a folder, that can't be
        used."""
        if spec is None:
            made = job_spec(script, shipped=working_dir is not None, **arguments)
            if working_dir is not None:
                packed = pack(Path(working_dir))
                if not (made.is_module or made.no_python):
                    packed.check_entry(Path(working_dir), os.path.join(made.workdir, made.entry))
                made.code.CopyFrom(self.put_code(packed))
            spec = made
        elif script or working_dir is not None or arguments:
            raise TypeError("submit takes a specification, or a script with its arguments, not both. [BG812]")
        if spec.ByteSize() > MAX_SPEC_BYTES:  # gRPC would say it in its own words
            raise InvalidRequestError(f"{too_large_spec(spec.ByteSize())} [BG812]")
        request = job_pb2.SubmitJobRequest(
            spec=spec, idempotency_key=idempotency_key, namespace=namespace, secrets=secrets, unix_user=unix_user
        )
        return traced(request, lambda: self._call(self._stub.SubmitJob, request))

    def put_code(self, packed: Packed) -> common_pb2.CodeArchive:
        """Uploads an archive, unless the coordinator has it. Returns its description, for ``JobSpec.code``. Raises
        TooMuchError if the coordinator has no room."""
        if self._call(self._stub.FindCode, packed.archive).held:
            return packed.archive

        def messages() -> Iterator[job_pb2.PutCodeRequest]:
            yield job_pb2.PutCodeRequest(archive=packed.archive)
            for data in packed.parts(UPLOAD_BYTES):
                yield job_pb2.PutCodeRequest(data=data)

        with self._words(UPLOAD_S):
            self._stub.PutCode(messages(), timeout=UPLOAD_S, metadata=self._metadata)
        return packed.archive

    def get(self, job_id: str) -> job_pb2.Job:
        """The job with its ranks."""
        return self._call(self._stub.GetJob, job_pb2.GetJobRequest(job_id=job_id))

    def find(self, prefix: str) -> str:
        """The id of the one job that has ``prefix`` as its id or at its beginning. Raises NotFoundError if there is
        none, ConflictError if there are several."""
        return self._call(self._stub.FindJob, job_pb2.FindJobRequest(prefix=prefix)).job_id

    def list(
        self, states: Iterable[common_pb2.JobState.ValueType] = (), limit: int = 100, namespace: str = ""
    ) -> Sequence[job_pb2.Job]:
        """The ``limit`` newest jobs in one of ``states`` (none: all), the newest first; of one ``namespace``, or of all
        that the account may see. Of the specification each has
        only name, entry and sizes; ranks and what is waited for are left out, too: ``get`` tells all."""
        request = job_pb2.ListJobsRequest(states=list(states), namespace=namespace)
        found: list[job_pb2.Job] = []
        while True:
            request.limit = min(limit - len(found), PAGE)
            reply = self._call(self._stub.ListJobs, request)
            found += reply.jobs
            request.page_token = reply.next_page_token
            if len(found) >= limit or not reply.next_page_token:
                return tuple(found[:limit])

    def page(
        self, states: Iterable[common_pb2.JobState.ValueType] = (), limit: int = 100, token: str = ""
    ) -> tuple[Sequence[job_pb2.Job], str]:
        """Returns some of ``list`` and the token of the next page; empty: there is none. ``token``: that of the page
        before.
        """
        request = job_pb2.ListJobsRequest(states=list(states), limit=limit, page_token=token)
        reply = self._call(self._stub.ListJobs, request)
        return tuple(reply.jobs), reply.next_page_token

    def events(self, job_id: str, after_seq: int = 0) -> Iterator[job_pb2.JobEvent]:
        """Events of the job so far, in order."""
        while True:
            request = job_pb2.ListEventsRequest(job_id=job_id, after_seq=after_seq)
            found = self._call(self._stub.ListEvents, request).events
            if not found:
                return
            yield from found
            after_seq = found[-1].seq

    def cancel(self, job_id: str, reason: str = "") -> job_pb2.Job:
        """Asks for the end of the job; returns at once. A job that has ended stays as it is."""
        return self._call(self._stub.CancelJob, job_pb2.CancelJobRequest(job_id=job_id, reason=reason))

    def scale(self, job_id: str, nodes: int) -> job_pb2.Job:
        """Asks that an elastic job have ``nodes`` nodes; returns before it has. Raises InvalidRequestError for a number
        beyond what it was submitted for, ConflictError for a job that can't change."""
        return self._call(self._stub.ScaleJob, job_pb2.ScaleJobRequest(job_id=job_id, nodes=nodes))

    def pause(self, job_id: str) -> job_pb2.Job:
        """Asks that an elastic job wait after its present step; returns before it does. Raises ConflictError."""
        return self._call(self._stub.PauseJob, job_pb2.PauseJobRequest(job_id=job_id))

    def resume(self, job_id: str) -> job_pb2.Job:
        """Asks that a paused job go on. Raises ConflictError."""
        return self._call(self._stub.ResumeJob, job_pb2.ResumeJobRequest(job_id=job_id))

    @overload
    def watch(
        self,
        job_id: str,
        after_seq: int = 0,
        patience_s: float = PATIENCE_S,
        on_away: Callable[[str], None] | None = None,
        *,
        logs: Literal[False] = False,
    ) -> Iterator[job_pb2.JobUpdate]: ...

    @overload
    def watch(
        self,
        job_id: str,
        after_seq: int = 0,
        patience_s: float = PATIENCE_S,
        on_away: Callable[[str], None] | None = None,
        *,
        logs: Literal[True],
    ) -> Iterator[job_pb2.JobUpdate | common_pb2.LogChunk]: ...

    def watch(
        self,
        job_id: str,
        after_seq: int = 0,
        patience_s: float = PATIENCE_S,
        on_away: Callable[[str], None] | None = None,
        *,
        logs: bool = False,
    ) -> Iterator[job_pb2.JobUpdate] | Iterator[job_pb2.JobUpdate | common_pb2.LogChunk]:
        """Yields all events after ``after_seq`` and the job as it is, then every change and each report of progress,
        until the job has ended. With ``logs`` chunks of the ranks' output come in between.

            for update in client.watch(job.job_id):
                match update.WhichOneof("update"):
                    case "event":    print(update.event.kind, update.event.reason)
                    case "job":      print(update.job.state, update.job.reason)
                    case "progress": print(update.progress.step)

        When the coordinator goes away ``on_away`` is told why, and the watch goes on where it was if it comes back
        within ``patience_s`` (jobs run on meanwhile); else UnavailableError is raised."""
        updates = functools.partial(self._updates, job_id, after_seq, patience_s, on_away)
        if not logs:
            return updates()
        # Logs wait for longer than updates, so that a coordinator that stays away raises the error of updates.
        chunks = functools.partial(self.logs, job_id, follow=True, patience_s=2 * patience_s)
        return iter(Merged[job_pb2.JobUpdate | common_pb2.LogChunk](updates, chunks, patience_s=LOG_PATIENCE_S))

    def _updates(
        self,
        job_id: str,
        after_seq: int,
        patience_s: float,
        on_away: Callable[[str], None] | None,
    ) -> Iterator[job_pb2.JobUpdate]:
        def read() -> Iterator[job_pb2.JobUpdate]:
            nonlocal after_seq
            request = job_pb2.WatchJobRequest(job_id=job_id, after_seq=after_seq)
            for update in self._stub.WatchJob(request, metadata=self._metadata):
                if update.WhichOneof("update") == "event":
                    after_seq = update.event.seq
                yield update

        return self._lasting(read, patience_s, on_away)

    def logs(
        self,
        job_id: str,
        ranks: Iterable[int] = (),
        follow: bool = False,
        tail: int = 0,
        patience_s: float = PATIENCE_S,
        on_away: Callable[[str], None] | None = None,
    ) -> Iterator[common_pb2.LogChunk]:
        """The output of ranks (none: all), in chunks as they come; the last ``tail`` lines only if that is not 0. With
        ``follow`` a job that is not placed yet is waited for, and the stream lasts until its ranks have ended; a
        coordinator that goes away is waited for as by ``watch``."""
        wanted = list(ranks)
        had: dict[int, int] = {}

        def read() -> Iterator[common_pb2.LogChunk]:
            request = job_pb2.ReadLogsRequest(job_id=job_id, ranks=wanted, follow=follow, tail_lines=tail, had=had)
            for chunk in self._stub.ReadLogs(request, metadata=self._metadata):
                if (seen := had.get(chunk.rank)) is not None:  # older coordinators begin again
                    chunk.data = chunk.data[max(0, seen - chunk.offset) :]
                    chunk.missing = min(chunk.missing, max(0, chunk.offset - seen))
                    chunk.offset = max(chunk.offset, seen)
                if chunk.data or chunk.missing:
                    had[chunk.rank] = chunk.offset + len(chunk.data)
                yield chunk

        return self._lasting(read, patience_s if follow else 0.0, on_away)

    def _lasting(
        self, read: Callable[[], Iterator[Reply]], patience_s: float, on_away: Callable[[str], None] | None
    ) -> Iterator[Reply]:
        """Passes on what the stream of ``read`` gives; it is begun again when the coordinator was away."""
        away_since: float | None = None
        pause = _FIRST_PAUSE_S
        while True:
            try:
                with self._words():
                    for one in read():
                        away_since, pause = None, _FIRST_PAUSE_S
                        yield one
                return
            except UnavailableError as error:
                now = time.monotonic()
                if away_since is None:
                    away_since = now
                if now - away_since >= patience_s or self._closed.is_set():
                    raise
                if on_away is not None:
                    on_away(str(error))
            self._closed.wait(pause)  # between two tries to connect
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def trace(self, job_id: str, steps: int = 0, timeout_s: float = 0.0) -> Trace:
        """Has all ranks and hosts of a job that runs record their next ``steps`` (0: 5); returns when they have, or
        after ``timeout_s`` (0: 60) with what has come. ``bagua.timeline.chrome.to_chrome`` makes a file of it. Raises
        NotFoundError, InvalidRequestError, and ConflictError for a job that makes no steps now."""
        found = Trace(job_id, steps or DEFAULT_TRACE_STEPS, island_size=island_size(self.get(job_id)))
        limit = (timeout_s or 60.0) + TRACE_GRACE_S
        request = job_pb2.TraceJobRequest(job_id=job_id, steps=steps, timeout_s=timeout_s)
        with self._words(limit):
            for chunk in self._stub.TraceJob(request, timeout=limit, metadata=self._metadata):
                if chunk.HasField("part"):
                    found.add(_source_of(chunk.part))
                else:
                    clock = chunk.clock
                    found.clocks[clock.node_id] = Clock(clock.offset_ns, clock.bound_ns, clock.missing)
        return found

    # ---- nodes

    def nodes(self) -> Sequence[job_pb2.Node]:
        """Lists all node daemons that were ever seen."""
        request = job_pb2.ListNodesRequest()
        found: list[job_pb2.Node] = []
        while True:
            reply = self._call(self._stub.ListNodes, request)
            found += reply.nodes
            request.page_token = reply.next_page_token
            if not reply.next_page_token:
                return tuple(found)

    def tunings(self) -> Sequence[job_pb2.Tuning]:
        """Findings of jobs that tune themselves, the newest first, without trials."""
        return self._call(self._stub.ListTuning, job_pb2.ListTuningRequest()).tunings

    def tuning(self, prefix: str) -> job_pb2.Tuning:
        """The one whose id begins so, with its trials. Raises NotFoundError, and ConflictError for several."""
        return self._call(self._stub.GetTuning, job_pb2.GetTuningRequest(prefix=prefix))

    def forget_tuning(self, prefix: str = "", all: bool = False) -> Sequence[str]:
        """Forgets that one, or ``all``; returns their ids. Raises as ``tuning``."""
        return self._call(self._stub.ForgetTuning, job_pb2.ForgetTuningRequest(prefix=prefix, all=all)).ids

    def drain(self, node_id: str, this_run: bool = False, exit_code: int | None = None) -> job_pb2.DrainNodeReply:
        """Asks that nothing begin on the node and elastic jobs leave it; returns before they have. ``this_run``: until
        its daemon ends; the next one takes jobs. ``exit_code``: its daemon ends so, once it is empty. Raises
        NotFoundError, and ConflictError if it is the last node of an elastic job."""
        return self._call(
            self._stub.DrainNode, job_pb2.DrainNodeRequest(node_id=node_id, this_run=this_run, exit_code=exit_code)
        )

    def gone(self, node_id: str, why: str) -> None:
        """Tells that nothing of the node runs any more, as its machine or its pod is gone. Raises NotFoundError, and
        ConflictError while it has a session."""
        self._call(self._stub.DrainNode, job_pb2.DrainNodeRequest(node_id=node_id, gone=why))

    def undrain(self, node_id: str) -> job_pb2.Node:
        """Lets jobs begin on the node again. Raises NotFoundError."""
        return self._call(self._stub.UndrainNode, job_pb2.UndrainNodeRequest(node_id=node_id))

    def upgrade(self, node_id: str) -> job_pb2.UpgradeNodeReply:
        """The daemon that is installed on the node now takes over from the one that runs; returns when it has. Raises
        NotFoundError, ConflictError if it can't, and UnavailableError if the node is away."""
        with self._words(UPGRADE_S):
            request = job_pb2.UpgradeNodeRequest(node_id=node_id)
            return self._stub.UpgradeNode(request, timeout=UPGRADE_S, metadata=self._metadata)

    # ---- helpers

    def _call(self, method: Callable[..., Reply], request: Message) -> Reply:
        with self._words():
            return method(request, timeout=self._timeout_s, metadata=self._metadata)

    @contextmanager
    def _words(self, timeout_s: float | None = None) -> Iterator[None]:
        """Turns errors of gRPC into ours. ``timeout_s``: of the call, if it is not that of all."""
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.CANCELLED and self._closed.is_set():
                raise UnavailableError("The client was closed. [BG801]") from error
            if code is grpc.StatusCode.CANCELLED:
                raise UnavailableError(
                    f"The coordinator at {self.address} ended the call: {details} [BG801]"
                ) from error
            if code is grpc.StatusCode.UNAVAILABLE:
                self._renew()
                remedy = handshake_words(details, self._tls is not None)
                words = f"No coordinator answers at {self.address} ({details.rstrip('.')})."
                if remedy:
                    raise UnavailableError(f"{words} {remedy} [BG808]") from error
                raise UnavailableError(
                    f"{words} Start one with `bagua coordinator`, or pass --coordinator. [BG801]"
                ) from error
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise UnavailableError(
                    f"The coordinator at {self.address} did not answer within {timeout_s or self._timeout_s:g} s. "
                    "[BG801]"
                ) from error
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise ServiceError(
                    f"The coordinator at {self.address} does not know this call: its version of bagua is older. [BG803]"
                ) from error
            raise error_of(code, details) from error


def _source_of(part: common_pb2.TracePart) -> Source:
    spans = [
        Span(span.phase, span.name, span.begin_ns, span.end_ns, span.sequence, span.comm, span.peer, span.bytes)
        for span in part.spans
    ]
    return Source(
        part.node_id, part.rank, part.hostname, part.member, spans, part.dropped, part.missing, tuple(part.hosts)
    )
