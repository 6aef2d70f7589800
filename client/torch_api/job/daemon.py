"""Client of the node daemon's gRPC service for ranks, and the membership that it tells a rank.

gRPC channels are opened for single calls and closed again: training code forks (DataLoader workers), and a process
with live gRPC threads should not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import grpc

import bagua
from bagua.base.errors import ServiceError
from bagua.base.rpc import CHANNEL_OPTIONS, error_of
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto.common_pb2 import Progress, TuneReply, TuneRequest
from bagua.proto.rank_pb2 import DescribeWaitsRequest, JoinRequest, TakesNewcomersRequest, TraceReport
from bagua.proto.rank_pb2_grpc import RankServiceStub
from bagua.torch_api.job import environment

# A cold build of the core on a slow machine may come before the daemon answers.
JOIN_DEADLINE_S = 300.0
CALL_DEADLINE_S = 5.0
TUNE_DEADLINE_S = 40.0  # the daemon answers sooner


@dataclass(frozen=True)
class Membership:
    """The ranks that take part in one generation of a job: this one, and those of every host in order.

    ``numbers``: the member number of each rank, which a process keeps for life. Empty: the same as the ranks.
    ``resting``: numbers of members that have no state yet, and take part in nothing but getting it. ``lobby``: it is no
    generation of the job, but newcomers of one host that have not been let in.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    job_id: str = ""
    generation: int = 1
    numbers: tuple[int, ...] = ()
    resting: frozenset[int] = frozenset()
    lobby: bool = False
    island_size: int = 1

    @property
    def members(self) -> tuple[int, ...]:
        """The member number of each rank."""
        return self.numbers or tuple(range(self.world_size))

    @property
    def member(self) -> int:
        """Member number of this process."""
        return self.members[self.rank]

    @property
    def later(self) -> bool:
        """True if it is another generation than the first one: members have been lost, or have come."""
        return self.generation > 1 and not self.lobby

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks of the members that take part."""
        return tuple(rank for rank, member in enumerate(self.members) if member not in self.resting)

    @property
    def island(self) -> tuple[int, ...]:
        """Ranks that hold one copy of a sharded model together with this one. Islands of one rank: all that take part,
        because torch.distributed's world is theirs."""
        if self.island_size == 1:
            return self.active
        first = self.rank - self.place
        return tuple(range(first, first + self.island_size))

    @property
    def place(self) -> int:
        """Position of this rank in its island."""
        return self.rank % self.island_size

    def at_place(self, place: int | None) -> tuple[int, ...]:
        """Ranks of the members that take part, at this position of each island. None: all."""
        return self.active if place is None else self.active[place :: self.island_size]

    @property
    def alike(self) -> tuple[int, ...]:
        """Ranks that hold the same shards as this one: one of each island, also of those that take no part yet."""
        return tuple(range(self.place, self.world_size, self.island_size))

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

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables in which programs, and the rank getters, read it."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": len(self.local_ranks),
            "NODE_RANK": self.node_rank,
        }
        return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True)
class Admission:
    """The daemon's answer to Join, from which a connection is made. ``member``: number of this process."""

    job_id: str
    member: int
    data_socket: str
    token: bytes


class DaemonClient:
    """The daemon's service for ranks. Every call raises ServiceError (or a subclass) with the daemon's words."""

    _begun = False

    def __init__(self, socket: str, job_id: str) -> None:
        self.socket = socket
        self.job_id = job_id

    @contextmanager
    def channel(self) -> Iterator[RankServiceStub]:
        """A stub on a channel that lives as long as the block; errors of calls become ServiceError."""
        try:
            with self._channel() as channel:
                yield RankServiceStub(channel)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _channel(self) -> grpc.Channel:
        # gRPC's own preparation for forks, of which it reads when it begins, would stop its threads at each fork and
        # write about it to stderr.
        first, DaemonClient._begun = not DaemonClient._begun, True
        with environment.for_a_moment("GRPC_ENABLE_FORK_SUPPORT", "0") if first else nullcontext():
            return grpc.insecure_channel(f"unix:{self.socket}", options=CHANNEL_OPTIONS)

    def _translate(self, error: grpc.RpcError) -> ServiceError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE:
            details = (
                f"The node daemon does not answer at {self.socket} ({details}). Is it running? BAGUA_DAEMON_SOCKET "
                "names its socket; without that variable a daemon is started for the job. [BG921]"
            )
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"The node daemon at {self.socket} did not answer in time. [BG921]"
        return error_of(code, details)

    def join(self, rank: int, timeout_s: float = JOIN_DEADLINE_S) -> Admission:
        """Asks the daemon to admit this process as ``rank`` of the job, its number for life; waits until the job's
        engine is ready."""
        request = JoinRequest(
            job_id=self.job_id,
            rank=rank,
            pid=os.getpid(),
            version=bagua.__version__,
            wire_version=WIRE_VERSION,
        )
        with self.channel() as stub:
            reply = stub.Join(request, timeout=timeout_s)
        return Admission(self.job_id, rank, reply.data_socket, reply.data_token)

    def describe_waits(self) -> str:
        """Waits in this job, one line each: which rank waits for which."""
        with self.channel() as stub:
            return stub.DescribeWaits(DescribeWaitsRequest(job_id=self.job_id), timeout=CALL_DEADLINE_S).waiting

    def take_newcomers(self, member: int) -> None:
        """The program of this rank can take newcomers."""
        with self.channel() as stub:
            stub.TakesNewcomers(TakesNewcomersRequest(job_id=self.job_id, rank=member), timeout=CALL_DEADLINE_S)

    def tune(self, request: TuneRequest) -> TuneReply:
        """The coordinator's answer to what rank 0 tells and asks."""
        with self.channel() as stub:
            return stub.Tune(request, timeout=TUNE_DEADLINE_S)

    def report_trace(self, report: TraceReport) -> None:
        """Passes on what this rank recorded."""
        with self.channel() as stub:
            stub.ReportTrace(report, timeout=CALL_DEADLINE_S)

    def report(self, progress: Progress, stub: RankServiceStub) -> None:
        """Passes progress on, over a channel that the caller keeps."""
        try:
            stub.ReportProgress(progress, timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            raise self._translate(error) from None
