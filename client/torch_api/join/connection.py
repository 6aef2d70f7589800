"""One rank's connection to its node daemon: gRPC to join, the core's shared-memory channel for everything after that.

gRPC channels are opened for single calls and closed again: training code forks (DataLoader workers), and a process
with live gRPC threads should not.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

import bagua
from bagua.base.errors import BuildError, CommunicationError, ConfigError, ServiceError
from bagua.base.rpc import CHANNEL_OPTIONS, error_of
from bagua.proto.common_pb2 import Progress
from bagua.proto.rank_pb2 import DescribeWaitsRequest, JoinRequest
from bagua.proto.rank_pb2_grpc import RankServiceStub
from bagua.torch_api.join import environment

if TYPE_CHECKING:
    from bagua.csrc import core

LOG = logging.getLogger("bagua")

# A cold build of the core on a slow machine may come before the daemon answers.
JOIN_DEADLINE_S = 300.0
CALL_DEADLINE_S = 5.0
FIRST_WARNING_S = 30.0
WARNING_EVERY_S = 60.0

Times = tuple[int, int, int]
Place = tuple[int, int]
NOWHERE: Place = (0, 0)


class Encoding(NamedTuple):
    """How an all-reduce of float32 crosses between hosts: see ``Rank.submit`` in csrc/core.pyi."""

    codec: int = 0
    density: int = 0
    residual: int = 0
    exact: int = 0


AS_IT_IS = Encoding()


@dataclass(frozen=True)
class Membership:
    """Who takes part: this rank, and the ranks of every host in order."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    job_id: str = ""
    generation: int = 1

    @property
    def world_size(self) -> int:
        return sum(len(ranks) for ranks in self.hosts)

    @property
    def node_rank(self) -> int:
        """Index of this rank's host."""
        return next(index for index, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on this host."""
        return self.hosts[self.node_rank]

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)


@dataclass(frozen=True)
class Admission:
    """The daemon's answer to Join: what a ``Connection`` is made of."""

    membership: Membership
    data_socket: str
    token: bytes


class DaemonClient:
    """The daemon's service for ranks. Every call raises ServiceError (or a subclass) with the daemon's words."""

    def __init__(self, socket: str, job_id: str) -> None:
        self.socket = socket
        self.job_id = job_id

    @contextmanager
    def channel(self) -> Iterator[RankServiceStub]:
        """A stub on a channel that lives as long as the block; errors of calls become ServiceError."""
        try:
            with grpc.insecure_channel(f"unix:{self.socket}", options=CHANNEL_OPTIONS) as channel:
                yield RankServiceStub(channel)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _translate(self, error: grpc.RpcError) -> ServiceError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE:
            details = (
                f"The node daemon does not answer at {self.socket} ({details}). Is it running? BAGUA_DAEMON_SOCKET "
                "names its socket; without that variable a daemon is started for the job."
            )
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"The node daemon at {self.socket} did not answer in time."
        return error_of(code, details)

    def join(self, rank: int, timeout_s: float = JOIN_DEADLINE_S) -> Admission:
        """Asks the daemon to admit this process as ``rank`` of the job; waits until the job's engine is ready."""
        request = JoinRequest(job_id=self.job_id, rank=rank, pid=os.getpid(), version=bagua.__version__)
        with self.channel() as stub:
            reply = stub.Join(request, timeout=timeout_s)
        hosts = tuple(tuple(host.ranks) for host in reply.hosts)
        if rank not in hosts[reply.host_index]:
            raise ServiceError(f"The node daemon admitted rank {rank} to host {reply.host_index}, which has {hosts}.")
        membership = Membership(rank, hosts, self.job_id, reply.generation)
        return Admission(membership, reply.data_socket, reply.data_token)

    def describe_waits(self) -> str:
        """Who waits for whom in this job, one line each."""
        with self.channel() as stub:
            return stub.DescribeWaits(DescribeWaitsRequest(job_id=self.job_id), timeout=CALL_DEADLINE_S).waiting

    def report(self, progress: Progress, stub: RankServiceStub) -> None:
        """Passes progress on, over a channel that the caller keeps."""
        try:
            stub.ReportProgress(progress, timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            raise self._translate(error) from None


class Connection:
    """Operations of this rank. Thread-safe. The core's errors come as CommunicationError with its words.

    ``describe_waits`` is asked when an operation takes long; its answer goes to the log.
    """

    def __init__(
        self, membership: Membership, data_socket: str, token: bytes, describe_waits: Callable[[], str] | None = None
    ) -> None:
        from bagua import csrc

        try:
            module = csrc.load()  # builds the core where that has not been done
        except csrc.BuildError as error:
            raise BuildError(str(error)) from error
        self.membership = membership
        self.kinds: Mapping[str, int] = module.KINDS
        self.dtypes: Mapping[str, int] = module.DTYPES
        self.codecs: Mapping[str, int] = module.CODECS
        self._describe_waits = describe_waits
        self._wait_limit_s = environment.get_wait_timeout()
        self._error: type[Exception] = module.CoreError
        with self._translated():
            self._rank: core.Rank = module.Rank(data_socket=data_socket, token=token, rank=membership.rank)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise CommunicationError(str(error)) from None

    @property
    def native(self) -> core.Rank:
        """The core's end, for the GPU leg, which works beside it."""
        return self._rank

    def require(self, nbytes: int) -> None:
        """Announces how much shared memory this rank will ask for. Raises ConfigError where that can't be had."""
        try:
            self._rank.require(nbytes)
        except self._error as error:
            raise ConfigError(str(error)) from None

    def alloc(self, nbytes: int) -> core.Segment:
        """Shared memory from the daemon."""
        with self._translated():
            return self._rank.alloc(nbytes)

    def free(self, segment_id: int) -> None:
        """Gives memory back. Silent when the daemon is gone, and with it the memory."""
        try:
            self._rank.free(segment_id)
        except self._error as error:
            LOG.debug("Segment %d was not given back: %s", segment_id, error)

    def create_comm(self, comm: int, ranks: Sequence[int]) -> None:
        with self._translated():
            self._rank.create_comm(comm, ranks)

    def destroy_comm(self, comm: int) -> None:
        with self._translated():
            self._rank.destroy_comm(comm)

    def submit(
        self,
        kind: int,
        *,
        comm: int,
        dtype: int,
        count: int,
        op: int = 0,
        root: int = -1,
        src: Place = NOWHERE,
        dst: Place = NOWHERE,
        shape: Sequence[int] = (),
        label: str = "",
        encoding: Encoding = AS_IT_IS,
    ) -> int:
        """Hands one operation to the daemon; returns its ticket at once. ``src`` and ``dst`` are (segment, byte
        offset)."""
        try:
            return self._rank.submit(
                comm=comm,
                kind=kind,
                dtype=dtype,
                op=op,
                count=count,
                root=root,
                src=src,
                dst=dst,
                shape=shape,
                label=label,
                codec=encoding.codec,
                density=encoding.density,
                residual=encoding.residual,
                exact=encoding.exact,
            )
        except self._error as error:
            raise CommunicationError(str(error)) from None

    def transfer(self, *request: Any) -> None:
        """One operation on tensors at any address, from submission to the end: the arguments of the core's
        ``Rank.transfer`` but the last. Long waits are logged as those of ``wait``."""
        try:
            waited = self.first_warning_s
            pending = self._rank.transfer(*request, timeout_s=waited)
            while pending is not None:
                more = self.go_on(waited)
                if pending.wait(more):
                    return
                waited += more
        except self._error as error:
            raise CommunicationError(str(error)) from None

    @property
    def first_warning_s(self) -> float:
        """Seconds after which ``go_on`` is to be asked for the first time."""
        return min(FIRST_WARNING_S, self._wait_limit_s)

    def go_on(self, waited: float, limit: float = math.inf, more: str = "") -> float:
        """Says who waits for whom, and for how many seconds this rank will wait on. ``more``: what else is known.
        Raises CommunicationError at the limit, which is ``environment.get_wait_timeout()`` at the latest."""
        limit = min(limit, self._wait_limit_s)
        waiting = " ".join(filter(None, (self._who_waits(), more)))
        if waited >= limit:
            hint = " BAGUA_WAIT_TIMEOUT_S sets the limit." if limit == self._wait_limit_s else ""
            raise CommunicationError(f"Rank {self.membership.rank} gave up after {waited:.0f} s. {waiting}{hint}")
        LOG.warning("Rank %d has waited for %.0f s. %s", self.membership.rank, waited, waiting)
        return min(WARNING_EVERY_S, limit - waited)

    def wait(self, ticket: int, deadline_s: float = math.inf) -> Times:
        """Waits for an operation; returns (submitted, started, done) in ns of CLOCK_MONOTONIC.

        Ends when the operation is done, or fails: the daemon fails it when a rank or host is lost. A wait longer than
        30 s is logged, with who waits for whom. After ``get_wait_timeout()`` seconds it is an error: ranks may live and
        never come (two that receive from each other). ``deadline_s``: an earlier limit, for operations that wait for a
        process that may never have started: nobody can see it die.
        """
        try:
            waited = min(self.first_warning_s, deadline_s)
            times = self._rank.wait(ticket, waited)
            while times is None:
                more = self.go_on(waited, deadline_s)
                times = self._rank.wait(ticket, more)
                waited += more
            return times
        except self._error as error:
            raise CommunicationError(str(error)) from None

    def done(self, ticket: int) -> bool:
        """Whether ``wait`` for this operation would return, or raise, at once."""
        with self._translated():
            return self._rank.done(ticket)

    def barrier(self, comm: int = 0, deadline_s: float = math.inf) -> None:
        """Returns when every member has called it."""
        self.wait(self.submit(self.kinds["barrier"], comm=comm, dtype=self.dtypes["uint8"], count=0), deadline_s)

    def _who_waits(self) -> str:
        if self._describe_waits is None:
            return ""
        try:
            return self._describe_waits()
        except ServiceError as error:
            return f"The node daemon can't say for whom: {error}"

    def counters(self) -> dict[str, int]:
        """Counters of this host's engine."""
        return self._rank.counters()

    def close(self) -> None:
        """Tells the daemon that this rank leaves in good order. Idempotent; in a forked child the parent's stays as
        it is."""
        self._rank.close()
